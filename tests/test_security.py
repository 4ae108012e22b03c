"""The threat model of SECURITY.md, a test for each of its sentences, which is the test's docstring."""

import io
import json
import os
import re
import shutil
import stat
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import recurl
from recurl.cli.main import load, main
from recurl.core.archive import load_archive
from recurl.core.errors import ArgumentError, RecurlError
from recurl.data import LazyMemmapStorage, ReplayBuffer
from recurl.envs import GymEnv
from recurl.trainers import PPOConfig, RunFolder
from recurl.trainers.export.formats import FORMATS
from recurl.trainers.files.checkpoints import load_checkpoint
from recurl.trainers.report.metrics import read_metrics
from recurl.trainers.run.callbacks import load_callback
from tests.bounds import within

SENTENCES = re.findall(r"^\d+\. (.*?\.)$", (Path(__file__).parents[1] / "SECURITY.md").read_text(), re.MULTILINE)
MODULE = "module_of_a_stranger"
SMALL = ["--env", "recurl/RepeatPrevious-v0", "--env-kwargs", "k=1", "episode_length=8", "--hidden-size", "8"]
SMALL += ["--num-envs", "4", "--rollout-steps", "16", "--eval-episodes", "2", "--total-steps", "64", "--logger", "none"]
COMMANDS = ["evaluate RUN --episodes 2", "play RUN", "export RUN --format torch", "doctor RUN", "train --resume RUN"]
COMMANDS += ["train --config RUN/config.json --run-dir RUN/new", "sweep --config RUN/config.json --run-dir RUN/new"]
NAMED = {
    "cell": f"{MODULE}:Cell",
    "algorithm": f"{MODULE}:ppo",
    "env": f"{MODULE}:Env-v0",
    "eval_env": f"{MODULE}:Env-v0",
    "wrapper": [f"{MODULE}:Wrapper(a=1)"],
    "callback": [f"{MODULE}:Callback"],
}
CALLS = []


def test_every_sentence_has_its_test():
    said = {" ".join(value.__doc__.split()) for value in globals().values() if getattr(value, "__doc__", None)}
    assert len(SENTENCES) >= 10
    assert [sentence for sentence in SENTENCES if sentence not in said] == []


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def ran():
    return Path("ran").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", "ppo", *SMALL, "--run-dir", str(path)]) == 0
    return path


@pytest.fixture
def stranger(trained, tmp_path, monkeypatch):
    """Return a function that puts the folder RUN into the working directory, with a module that records its import."""
    (tmp_path / f"{MODULE}.py").write_text("import os\nos.mkdir('ran')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as with python -m recurl

    def put(**options):
        shutil.rmtree("RUN", ignore_errors=True)
        shutil.copytree(trained, "RUN")
        values = json.loads(Path("RUN/config.json").read_text())
        Path("RUN/config.json").write_text(json.dumps(values | options))

    put()
    yield put
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize("option", NAMED)
def test_nothing_runs(stranger, option, capsys):
    """Nothing in a run folder runs: no command imports, calls or unpickles anything of the folder's choice."""
    stranger(**{option: NAMED[option]})
    for command in COMMANDS:
        assert main(command.split()) == 2, command
        assert "names code" in capsys.readouterr().err
    assert main(["compare", "RUN"]) == 0
    assert not ran()


def test_the_users_word(stranger):
    """Names of code or of a Ray cluster require the user's consent: `--trust-run`, `trust=True`, or the same name given
    by the user.
    """
    given = ["--config", "RUN/config.json", "--run-dir", "new", "--cell", f"{MODULE}:Cell"]
    for words in (*(f"{command} --trust-run".split() for command in COMMANDS), ["train", *given], ["sweep", *given]):
        stranger(cell=f"{MODULE}:Cell")
        assert main(words) == 2  # the module has no cell
        assert ran(), words
        Path("ran").rmdir()
        del sys.modules[MODULE]
    stranger(collectors="ray:2", ray_address="198.51.100.1:6379")
    with pytest.raises(ArgumentError, match="would join the Ray cluster there"):
        RunFolder(Path("RUN")).read_config()
    stranger(cell=f"{MODULE}:Cell")
    for read in (lambda: recurl.load("RUN", trust=True), RunFolder(Path("RUN"), trust=True).read_config):
        with pytest.raises(ArgumentError, match="has no cell"):
            read()
        assert ran()
        Path("ran").rmdir()
        del sys.modules[MODULE]


def test_numbers_are_read_as_data(stranger):
    """`recurl compare` reads options and numbers as data, and imports nothing that a folder names, trusted or not."""
    stranger(**NAMED, num_envs=2**31 - 1, env_workers=2)
    assert main(["compare", "RUN", "RUN"]) == 0
    with pytest.raises(ArgumentError, match=r"has no evaluation \(--eval-every\)"):
        recurl.trainers.study.compare([Path("RUN")], "evaluation")
    RunFolder(Path("RUN"), trust=True).read_written()
    assert not ran()


@pytest.mark.parametrize("package", ["memory_maze", "minigrid", "popgym", "ale_py"])
def test_the_working_directory(stranger, package, capsys, monkeypatch):
    """A module in the working directory is never imported on a folder's behalf without that consent."""
    Path(f"{MODULE}.py").rename(f"{package}.py")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    stranger(env=f"{package}:Env-v0")
    assert main(["evaluate", "RUN"]) == 2
    assert f"{package}.py" in capsys.readouterr().err
    assert not ran()


@pytest.mark.parametrize(
    "command", ["compare RUN", "evaluate RUN", "train --resume RUN", "doctor RUN", "train ppo --help"]
)
def test_the_path(stranger, command, monkeypatch):
    """A module in the working directory is never imported on a folder's behalf without that consent."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    load(command.split())
    assert ("" in sys.path) == command.endswith("--help")  # which accepts module names from the command line
    load([*command.split(), "--trust-run"])
    assert ("" in sys.path) == (command != "compare RUN")


def function(*arguments, **options):
    CALLS.append((arguments, options))


def test_calls_of_named_code():
    """Only cells, wrappers, callbacks and registered environments and algorithms are called."""
    here = f"{__name__}:function"
    for options in ({"cell": here}, {"cell": f"{here}(a=1)"}, {"wrapper": (here,)}, {"wrapper": (f"{here}(a=1)",)}):
        with pytest.raises(ArgumentError, match="must be a subclass of"):
            recurl.trainers.make_env(PPOConfig(env="recurl/TMaze-v0", **options), 1)
    with pytest.raises(ArgumentError, match="A callback must have one of the methods"):
        load_callback(here)
    with pytest.raises(ArgumentError, match="There is no algorithm"):
        recurl.trainers.find_algorithm(here)
    with pytest.raises(ArgumentError, match="can't create"):
        recurl.trainers.make_env(PPOConfig(env=here), 1)
    assert not CALLS


def test_tensors_and_plain_values(tmp_path, monkeypatch):
    """Checkpoints and replay buffers hold tensors and plain values; anything else in them is refused, not unpickled."""
    monkeypatch.chdir(tmp_path)
    torch.save({"format_version": 2, "contents": {}, "x": Bomb()}, "000000000001.pt")
    for read in (load_checkpoint, load_archive):
        with pytest.raises(ArgumentError):
            read(Path("000000000001.pt"))
    buffer = ReplayBuffer(storage=LazyMemmapStorage(8))
    buffer.extend(TensorDict({"x": torch.arange(8.0)}, [8]))
    buffer.dumps(tmp_path / "buffer")
    for path in [path for path in (tmp_path / "buffer").rglob("*") if path.is_file()]:
        kept = path.read_bytes()
        torch.save(Bomb(), path)
        with pytest.raises((RecurlError, OSError)):
            ReplayBuffer(storage=LazyMemmapStorage(8)).loads(tmp_path / "buffer")
        path.write_bytes(kept)
    assert not ran()


def test_exported_policies(tmp_path, monkeypatch):
    """An exported policy is read without unpickling objects, and a `.recurl` file calls nothing but the operations of a
    policy.
    """
    monkeypatch.chdir(tmp_path)
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), "policy.pt2")
    bomb = io.BytesIO()
    torch.save((Bomb(),), bomb)
    with zipfile.ZipFile("policy.pt2") as whole, zipfile.ZipFile("bomb.pt2", "w") as changed:
        for member in whole.infolist():
            data = bomb.getvalue() if member.filename.endswith(".pt") else whole.read(member)
            changed.writestr(member.filename, data)
    with pytest.raises(ArgumentError, match="this one contains objects that would run code"):
        FORMATS["torch"].read(Path("bomb.pt2"))
    for name in ("__setattr__", "__class__", "finish", "_call", "nothing"):
        about = {"dtype": {"dtype": "float32"}, "calls": [[name, [], {"options": {}}]], "ports": [[], [], []]}
        with Path("policy.recurl").open("wb") as file:
            np.savez(file, program=np.frombuffer(json.dumps(about).encode(), np.uint8))
        with pytest.raises(ArgumentError, match=f"names '{name}', not an operation of a policy"):
            FORMATS["compiled"].read(Path("policy.recurl"))
    np.savez("policy.npz", program=np.array([Bomb()], dtype=object))
    with pytest.raises(ValueError, match="pickle"):
        FORMATS["compiled"].read(Path("policy.npz"))
    assert not ran()


READERS = {
    "config.json": lambda: RunFolder(Path("RUN")).read_values(),
    "metrics.csv": lambda: read_metrics(Path("RUN/metrics.csv")),
    "evaluations.csv": lambda: read_metrics(Path("RUN/evaluations.csv")),
    "sweep.json": lambda: main(["sweep", "ppo", "--env", "recurl/TMaze-v0", "--run-dir", "RUN"]) == 2 and refuse(),
}


def refuse():
    raise ArgumentError("refused")


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["link", "device", "FIFO", "folder"])
def test_regular_files(stranger, name, kind):
    """Options, metrics and results of sweeps are read only from regular files; links, FIFOs and devices are refused at
    once.
    """
    path = Path("RUN") / name
    if path.exists():
        path.rename("kept")
    make = {"link": lambda: path.symlink_to("../kept"), "device": lambda: path.symlink_to("/dev/zero")}
    make |= {"FIFO": lambda: os.mkfifo(path), "folder": path.mkdir}
    make[kind]()
    with within(seconds=3), pytest.raises(ArgumentError):
        READERS[name]()


@pytest.mark.parametrize("name", READERS)
def test_bounds_of_files(stranger, name, capsys):
    """Options, metrics and results of sweeps are read within limits on size and depth, and refused in one line beyond
    them.
    """
    path = Path("RUN") / name
    path.write_bytes(b"[" * 100_000 + b"\n")
    for _ in range(2):
        with within(seconds=3), pytest.raises(ArgumentError) as caught:
            READERS[name]()
        assert "\n" not in str(caught.value)
        with path.open("wb") as file:
            file.truncate(2**33)  # a sparse file of 8 GiB
    assert len(capsys.readouterr().err.splitlines()) in (0, 2)


VALUES = [2**31 - 1, 10**400, -1, 1e308, float("inf"), "x" * 10**5, "-" * 5000 + "1", "(" * 5000, None, [], {}, [["a"]]]
VALUES += [True, "", "s5(state_size=" + "-" * 5000 + "1)", "lstm(" * 5000, "$\\frac{", "\x7f", ["k=" + "[" * 5000]]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_options_of_any_value(stranger, value, capsys):
    """Options of any value are accepted, or refused in one line, within a second."""
    options = list(PPOConfig(env="recurl/TMaze-v0").to_dict())
    with within(seconds=len(options)):
        for option in options:
            rest = {} if option == "env_workers" else {option: value}
            stranger(env_workers=2 if option == "num_envs" else 0, **rest)
            for read in (RunFolder(Path("RUN")).read_config, RunFolder(Path("RUN")).read_written):
                try:
                    read()
                except ArgumentError as error:
                    assert "\n" not in str(error)  # noqa: PT017 - it may also be accepted


@pytest.mark.parametrize("name", ["checkpoints", "best", "tensorboard", "wandb", ".lock", "metrics.csv", "config.json"])
def test_links_inside_a_run_folder(stranger, name):
    """Links inside a run folder are not followed: their targets are not read, written or removed."""
    path, outside = Path("RUN") / name, Path("outside")
    if path.is_dir():
        path.rename(outside)
    else:
        outside.mkdir()
        shutil.move(path, outside / "it") if path.exists() else (outside / "it").write_text("mine")
    path.symlink_to(
        Path("..") / outside if name in ("checkpoints", "best", "tensorboard", "wandb") else "../outside/it"
    )
    before = {file: file.read_bytes() for file in outside.iterdir()}
    assert main(["train", "--resume", "RUN", "--total-steps", "128"]) == 2
    assert path.is_symlink()
    main(["train", "ppo", "--overwrite", "--run-dir", "RUN", *SMALL])  # refused, or the link is removed
    assert {file: file.read_bytes() for file in outside.iterdir()} == before


def nested(depth):
    value = [1]
    for _ in range(depth):
        value = [value, value]
    return value


def cyclic():
    value = [1]
    value.append(value)
    return value


def compressed(method):
    data = io.BytesIO()
    torch.save({"x": torch.zeros(2**24)}, data)
    small = io.BytesIO()
    with zipfile.ZipFile(data) as whole, zipfile.ZipFile(small, "w", method) as changed:
        for member in whole.infolist():
            changed.writestr(member.filename, whole.read(member))
    return small.getvalue()


def saved(value):
    data = io.BytesIO()
    torch.save({"format_version": 2, "contents": {}, "x": value}, data)
    return data.getvalue()


ARCHIVES = {
    "bz2": lambda: compressed(zipfile.ZIP_BZIP2),
    "lzma": lambda: compressed(zipfile.ZIP_LZMA),
    "shared lists": lambda: saved(nested(60)),
    "cyclic list": lambda: saved(cyclic()),
    "strides of zero": lambda: saved(torch.zeros(1).expand(2**33)),
    "sparse": lambda: saved(torch.zeros(3).to_sparse()),
    "meta": lambda: saved(torch.zeros(2**40, device="meta")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHIVES)
def test_bounds_of_checkpoints(tmp_path, name):
    """Checkpoints are read in time and memory that the size of the file bounds, whatever it declares."""
    path = tmp_path / "000000000001.pt"
    path.write_bytes(ARCHIVES[name]())
    with within(seconds=3, megabytes=200), pytest.raises(ArgumentError) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_buffers_are_mapped_privately(tmp_path):
    """A replay buffer on disk is mapped privately: loading it and adding to it changes no file."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(8))
    buffer.extend(TensorDict({"x": torch.arange(8.0)}, [8]))
    buffer.dumps(tmp_path / "buffer")
    before = {path: path.read_bytes() for path in (tmp_path / "buffer").rglob("*") if path.is_file()}
    again = ReplayBuffer(storage=LazyMemmapStorage(8))
    again.loads(tmp_path / "buffer")
    again.extend(TensorDict({"x": -torch.ones(4)}, [4]))
    again[:]["x"].fill_(7)
    assert before == {path: path.read_bytes() for path in (tmp_path / "buffer").rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["link", "link to a device", "FIFO"])
@pytest.mark.parametrize(
    "command",
    [
        "train ppo --env recurl/TMaze-v0 --save-config OUT.toml",
        "compare RUN --out OUT.png",
        "export RUN --format torch --out OUT.pt2",
    ],
)
@pytest.mark.usefixtures("brief_verification")
def test_written_paths(stranger, kind, command):
    """Files that recurl writes, in a run folder or where the user specifies, never go through a link and never replace
    a FIFO or a device.
    """
    path = Path(command.split()[-1])
    Path("mine").write_text("mine")
    make = {"link": lambda: path.symlink_to("mine"), "FIFO": lambda: os.mkfifo(path)}
    make.get(kind, lambda: path.symlink_to("/dev/null"))()
    before = path.lstat()
    assert main(command.split()) == 2
    assert path.lstat().st_ino == before.st_ino
    assert Path("mine").read_text() == "mine"
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


HOSTILE_STATES = {
    "a function": ["same", "posix", "system"],
    "an object of another package": ["object", "subprocess", "Popen", []],
    "an object of a stranger": ["object", MODULE, "Env", []],
    "a method": ["method", "close", ["ref", 0]],
    "a call": ["partial", [["same", "posix", "system"], ["tuple", ["touch ran"]], None]],
}


@pytest.mark.parametrize("name", HOSTILE_STATES)
def test_states_of_environments(stranger, name):
    """The state of an environment in a checkpoint sets attributes to plain values; it imports nothing, and calls
    nothing that it names.
    """
    hostile = HOSTILE_STATES[name]
    env = GymEnv("CartPole-v1")
    env.reset(seed=0)
    state = env.get_state()
    begin, nodes = json.loads(state["gym"]["objects"])
    (attributes,) = [node[3] for node in nodes if node[0] == "object" and node[2] == "CartPoleEnv"]
    (force,) = [pair for pair in attributes if pair[0] == "force_mag"]
    nodes.append(hostile)
    force[1] = hostile if hostile[0] == "same" else ["ref", len(nodes) - 1]
    state["gym"]["objects"] = json.dumps([begin, nodes])
    with pytest.raises(ArgumentError):
        GymEnv("CartPole-v1").set_state(state)
    assert not ran()
    assert MODULE not in sys.modules
