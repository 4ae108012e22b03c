"""Names of code in a run folder: nothing they name is imported, called or created without permission."""

import contextlib
import json
import shutil
import sys
from pathlib import Path

import pytest

import recurl
from recurl.cli.main import main
from recurl.core.errors import ArgumentError
from recurl.trainers import PPOConfig, RunFolder, load_agent
from recurl.trainers.policies.load import load
from recurl.trainers.run.callbacks import load_callback
from recurl.trainers.trust import check_names, names_of_code

SMALL = ["--env", "recurl/RepeatPrevious-v0", "--env-kwargs", "k=1", "episode_length=8", "--hidden-size", "8"]
SMALL += ["--num-envs", "4", "--rollout-steps", "16", "--eval-episodes", "2", "--total-steps", "64", "--logger", "none"]
NAMED = {
    "cell": {"cell": "evil_module:Cell"},
    "cell with options": {"cell": "evil_module:Cell(size=3)"},
    "algorithm": {"algorithm": "evil_module:ppo"},
    "environment": {"env": "evil_module:Evil-v0"},
    "game": {"env": "pettingzoo/evil_module:parallel_env"},
    "environment of evaluations": {"eval_env": "evil_module:Evil-v0"},
    "wrapper": {"wrapper": ["recurl.envs.gym_wrappers:SelectEntries(start=0, stop=1)", "evil_module:Wrapper(a=1)"]},
    "callback": {"callback": ["evil_module:Callback"]},
    "submodule": {"cell": "evil_module.part:Cell"},
}
READERS = {
    "evaluate": ["evaluate", "RUN", "--episodes", "2"],
    "play": ["play", "RUN"],
    "export": ["export", "RUN", "--format", "torch"],
    "doctor": ["doctor", "RUN"],
    "resume": ["train", "--resume", "RUN"],
    "extend": ["train", "--resume", "RUN", "--total-steps", "128"],
    "config": ["train", "--config", "RUN/config.json", "--run-dir", "RUN/new"],
    "sweep": ["sweep", "--config", "RUN/config.json", "--run-dir", "RUN/new"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", "ppo", *SMALL, "--run-dir", str(path)]) == 0
    return path


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """Return a function that creates an untrusted run folder, in a working directory with modules of its author."""
    (tmp_path / "evil_module.py").write_text("import pathlib\npathlib.Path('ran').write_text('x')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(**options):
        shutil.copytree(trained, tmp_path / "RUN", dirs_exist_ok=True)
        values = json.loads((trained / "config.json").read_text())
        (tmp_path / "RUN" / "config.json").write_text(json.dumps(values | options))
        return tmp_path / "RUN"

    yield make
    sys.modules.pop("evil_module", None)


def ran():
    return Path("ran").exists()


@pytest.mark.parametrize("words", READERS.values(), ids=READERS)
@pytest.mark.parametrize("options", NAMED.values(), ids=NAMED)
def test_code_named_by_a_folder_is_refused(run, capsys, options, words):
    run(**options)
    assert main(words) == 2
    said = capsys.readouterr().err
    (name, value) = next(iter(options.items()))
    text = value[-1] if isinstance(value, list) else value
    assert f"--{name.replace('_', '-')} {text} would use the module evil_module" in said
    assert "found at" in said
    assert "evil_module.py" in said
    assert "add --trust-run (in Python, trust=True)" in said
    assert "Traceback" not in said
    assert not ran()


@pytest.mark.parametrize("options", NAMED.values(), ids=NAMED)
def test_reading_numbers_imports_nothing_trusted_or_not(run, options, capsys):
    folder = run(**options)
    assert main(["compare", str(folder)]) == 0
    assert not ran()
    if "algorithm" in options:
        assert "ppo, lstm" in capsys.readouterr().out


@pytest.mark.parametrize("options", NAMED.values(), ids=NAMED)
def test_python_needs_the_same_permission(run, options):
    folder = run(**options)
    for read in (
        load,
        recurl.load,
        lambda path: load_agent(RunFolder(path)),
        lambda path: RunFolder(path).read_config(),
    ):
        with pytest.raises(ArgumentError, match=r"names code: --.* would use the module evil_module.*trust=True"):
            read(folder)
    assert not ran()
    with contextlib.suppress(ArgumentError):  # the module lacks the expected names
        recurl.load(folder, trust=True)
    assert ran() == (not {"callback", "eval_env"} & options.keys())  # used in training only


@pytest.mark.parametrize("words", READERS.values(), ids=READERS)
def test_the_word_is_given(run, words):
    run(cell="evil_module:Cell")
    assert main([*words, "--trust-run"]) == 2  # the module has no such cell
    assert ran()


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_name_of_the_command_line_is_the_users_word(run, command, capsys):
    run(cell="evil_module:Cell")
    assert main([command, "--config", "RUN/config.json", "--run-dir", "new", "--cell", "evil_module:Other"]) == 2
    assert "has no cell 'Other'" in capsys.readouterr().err
    assert ran()


def test_an_environment_that_is_given_needs_no_other(run):
    folder = run(env="evil_module:Evil-v0")
    kwargs = {"k": 1, "episode_length": 8}
    policy = recurl.load(folder, env="recurl/RepeatPrevious-v0")
    assert not ran()
    assert policy is not None
    assert kwargs == RunFolder(folder).read_config("recurl/RepeatPrevious-v0").env_arguments


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("cell", "lstm"),
        ("cell", "s5(state_size=64)"),
        ("cell", "recurl.recurrence.cells.lstm:LSTMCell"),
        ("cell", f"{__name__}:Cell"),
        ("env", "CartPole-v1"),
        ("env", "recurl/TMaze-v0"),
        ("env", "pettingzoo/sisl/pursuit_v5"),
        ("env", "minigrid:MiniGrid-MemoryS7-v0"),
        ("env", "popgym:popgym-RepeatFirstEasy-v0"),
        ("env", "my_file.make()"),
        ("wrapper", ["gymnasium.wrappers:FlattenObservation", "minigrid.wrappers:ImgObsWrapper"]),
        ("wrapper", ["recurl.envs.gym_wrappers:SelectEntries(start=0, stop=8)"]),
        ("algorithm", "ppo"),
        ("device", "cuda:0"),
        ("collectors", "ray:8"),
        ("ray_address", "auto"),
        ("env_kwargs", ["mode=a:b"]),
    ],
)
def test_harmless_names(option, text):
    assert names_of_code({option: text}) == []


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("cell", "no_such_module:Cell"),
        ("cell", "no_such_module:Cell(a=1)"),
        ("env", "no_such_module:Env-v0"),
        ("env", "a:b:c"),
        ("env", "a(evil_module:Env"),
        ("env", ":Env-v0"),
        ("env", "..:Env"),
        ("env", "GymV21Environment-v0"),
        ("env", "gymnasium:GymV26Environment-v0"),
        ("env", "pettingzoo/os:system"),
        ("env", f"pettingzoo/{__name__}:called"),
        ("env", "pettingzoo/recurl.core.importing:load_object"),
        ("wrapper", ["gymnasium.wrappers:RecordVideo(video_folder='/tmp')"]),
        ("callback", ["os:abort"]),
        ("callback", [f"{__name__}:main"]),
        ("algorithm", "a(b:ppo"),
        ("an_option_of_an_algorithm_of_a_user", "no_such_module:Thing"),
        ("encoder", "no_such_module:Thing"),
        ("ray_address", "head:6379"),
        ("ray_address", "ray://head"),
    ],
)
def test_names_that_need_the_word(option, text):
    assert names_of_code({option: text})


def test_known_packages_count_only_where_they_are_installed(tmp_path, monkeypatch):
    """An environment package in the working directory isn't the one that recurl knows."""
    (tmp_path / "memory_maze.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert names_of_code({"env": "memory_maze:MemoryMaze-9x9-v0"})
    (tmp_path / "memory_maze.py").unlink()
    monkeypatch.delitem(sys.modules, "minigrid", raising=False)  # another test may have imported it
    (tmp_path / "minigrid").mkdir()
    (tmp_path / "minigrid" / "__init__.py").write_text("")
    assert names_of_code({"env": "minigrid:MiniGrid-MemoryS7-v0"})


def test_games_of_a_known_package(tmp_path, monkeypatch):
    (tmp_path / "site" / "mpe2").mkdir(parents=True)
    (tmp_path / "site" / "mpe2" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    assert not names_of_code({"env": "pettingzoo/mpe2.simple_spread_v3:parallel_env"})
    assert names_of_code({"env": "pettingzoo/mpe2.simple_spread_v3:raw_env"})
    assert names_of_code({"wrapper": ["pettingzoo/mpe2.simple_spread_v3:parallel_env"]})
    monkeypatch.chdir(tmp_path / "site")
    assert names_of_code({"env": "pettingzoo/mpe2.simple_spread_v3:parallel_env"})


def test_imported_code_needs_no_permission(tmp_path):
    """A folder may name the module of a cell that the program has already imported."""
    config = PPOConfig(env="recurl/TMaze-v0", cell="tests.own_cells:FastWeights")
    folder = RunFolder(tmp_path / "run")
    folder.create(config)
    assert folder.read_config() == config
    assert folder.holds(config)
    assert not folder.holds(PPOConfig(env="recurl/TMaze-v0"))


CALLED = []


def called(**options):
    CALLED.append(options)


@pytest.mark.parametrize(
    "text", [f"{__name__}:called", f"{__name__}:called()", f"{__name__}:called(a=1)", "os:getcwd(a=1)"]
)
def test_an_object_that_is_not_a_cell_is_not_called(text):
    with pytest.raises(ArgumentError, match=r"must be a subclass of recurl\.recurrence\.Cell"):
        PPOConfig(env="recurl/TMaze-v0", cell=text)
    assert not CALLED


def test_a_function_is_not_called_as_a_callback():
    with pytest.raises(ArgumentError, match="A callback must have one of the methods"):
        load_callback(f"{__name__}:called")
    assert not CALLED


def test_a_ray_cluster_of_a_strangers_choice_is_not_joined(run, capsys):
    """Ray processes send pickles. An address given by the user counts as permission."""
    folder = run(collectors="ray:2", ray_address="198.51.100.1:6379")
    assert main(["train", "--resume", "RUN"]) == 2
    said = capsys.readouterr().err
    assert "--ray-address 198.51.100.1:6379 would join the Ray cluster there, whose processes send code" in said
    config = RunFolder(folder).read_config(given=("ray_address",))
    assert config == RunFolder(folder, trust=True).read_config()


def test_a_refusal_shows_the_file_in_the_working_directory(tmp_path, monkeypatch):
    """The module is found there once the folder is trusted."""
    (tmp_path / "module_that_is_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with pytest.raises(ArgumentError, match=f"found at {tmp_path / 'module_that_is_here.py'}"):
        check_names({"cell": "module_that_is_here:Cell"}, "config.json")


def test_the_suggested_resume_command_includes_the_permission(tmp_path):
    folder = RunFolder(tmp_path / "run (1)")
    folder.create(PPOConfig(env="recurl/TMaze-v0", cell="tests.own_cells:FastWeights"))
    with pytest.raises(ArgumentError, match=rf"recurl train --resume '{tmp_path}/run \(1\)' --trust-run"):
        folder.create(PPOConfig(env="recurl/TMaze-v0"))


def test_data_sets_are_not_code(tmp_path, monkeypatch):
    """A folder with a colon in its name, or a data set of an installed Minari; not of one in the working directory."""
    folder, data_set = {"episodes": "evil_module:part"}, {"episodes": "minari:some/set-v0"}
    assert names_of_code(folder, imported=()) == []
    for where in ("packages", "here"):
        (tmp_path / where).mkdir()
        (tmp_path / where / "minari.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    assert names_of_code(data_set, imported=()) == []
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    assert names_of_code(data_set, imported=()) == [("episodes", "minari:some/set-v0")]
    assert names_of_code(data_set, imported=("minari",)) == []
