import os
import signal
import subprocess
import sys
import time

import pytest

from recurl import __version__
from recurl.cli import main
from recurl.trainers import RunFolder

SMALL = (  # noqa: SIM905 - reads as it is typed
    "--env recurl/RepeatPrevious-v0 --env-kwargs k=1 episode_length=8 --hidden-size 8 --num-envs 4 --rollout-steps 16 "
    "--sequence-length 8 --eval-episodes 3"
).split()
REPLAY = (  # noqa: SIM905 - reads as it is typed
    "--env recurl/RepeatPrevious-v0 --env-kwargs k=1 episode_length=8 --hidden-size 8 --num-envs 4 --rollout-steps 16 "
    "--slices 4 --slice-length 8 --burn-in 2 --learning-starts 64 --eval-episodes 3"
).split()


def train(folder, *more):
    return main(["train", "ppo", *SMALL, "--total-steps", "128", "--run-dir", str(folder), *more])


def fails(capsys, arguments, *words):
    """The command exits with 2 and one line on stderr that holds all words."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert said.startswith("recurl: ")
    for word in words:
        assert word in said


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert train(folder) == 0
    return folder


def test_train_then_evaluate(tmp_path, capsys):
    assert train(tmp_path / "run") == 0
    said = capsys.readouterr().out
    for words in ("Training recurl/RepeatPrevious-v0 by ppo with lstm", "128/128 steps", "Finished after 128 steps"):
        assert words in said
    assert "s of CPU time" in said
    assert "set-up" in said
    assert "Greedy evaluation over 3 episodes" in said
    assert main(["evaluate", str(tmp_path / "run"), "--episodes", "5", "--seed", "1"]) == 0
    assert "Greedy evaluation over 5 episodes" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["dqn", "r2d2"])
def test_train_from_replay_then_resume_then_evaluate(tmp_path, capsys, algorithm):
    folder = str(tmp_path / "run")
    assert main(["train", algorithm, *REPLAY, "--total-steps", "256", "--run-dir", folder]) == 0
    said = capsys.readouterr().out
    for words in (f"by {algorithm} with lstm", "256/256 steps", "eps 0.05", "Finished after 256 steps", "Greedy"):
        assert words in said
    assert RunFolder(tmp_path / "run").curve.exists()
    assert main(["train", "--resume", folder]) == 0
    assert main(["evaluate", folder, "--episodes", "5"]) == 0
    assert "Greedy evaluation over 5 episodes" in capsys.readouterr().out


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ppo", *SMALL, "--total-steps", "64", "--cell", "gru", "--seed", "3"]) == 0
    assert RunFolder(tmp_path / "runs" / "RepeatPrevious-v0-ppo-gru-seed3").metrics.exists()


def test_a_run_is_not_overwritten_by_accident(run, capsys):
    words = ["train", "ppo", *SMALL, "--run-dir", run]
    fails(capsys, words, "holds a run already", "--resume", "--overwrite")
    assert train(run, "--overwrite") == 0


def test_a_finished_run_can_be_resumed(run, capsys):
    assert main(["train", "--resume", str(run)]) == 0
    assert "Finished after 128 steps" in capsys.readouterr().out


def test_export(run, capsys, tmp_path):
    assert main(["export", str(run), "--format", "torch", "--out", str(tmp_path / "mine.pt2")]) == 0
    assert f"{tmp_path}/mine.pt2: the greedy policy" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"mine.pt2", "mine.pt2.json"}


def test_help_and_version(capsys):
    assert main(["--help"]) == 0
    assert "recurl train --resume RUN" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert main([]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("fly", ["no command 'fly'"]),
        ("train sac", ["no algorithm 'sac'", "ppo, dqn, r2d2"]),
        ("train", ["--resume"]),
        ("train ppo", ["--env"]),
        ("train ppo --env NoSuch-v0 --run-dir {tmp}/r", ["--env NoSuch-v0"]),
        ("train ppo --env recurl/TMaze-v0 --env-kwargs colour=1 --run-dir {tmp}/r", ["--env-kwargs", "colour"]),
        ("train ppo --env recurl/TMaze-v0 --env-kwargs corridor_length=0 --run-dir {tmp}/r", ["corridor_length"]),
        ("train ppo --env recurl/TMaze-v0 --cell rnn", ["--cell", "lstm, gru"]),
        ("train ppo --env recurl/TMaze-v0 --num-envs 0", ["--num-envs must be positive, got 0"]),
        ("train ppo --env recurl/TMaze-v0 --num-envs many", ["--num-envs"]),
        ("train ppo --env recurl/TMaze-v0 --colour red", ["--colour"]),
        ("train dqn", ["--env"]),
        ("train dqn --env Pendulum-v1 --run-dir {tmp}/r", ["DQN needs Discrete actions"]),
        ("train r2d2 --env recurl/TMaze-v0 --burn-in 40", ["--burn-in must be below --slice-length"]),
        ("train ppo --env recurl/TMaze-v0 --backend magic --run-dir {tmp}/r", ["magic"]),
        ("train ppo --env recurl/TMaze-v0 --device nowhere --run-dir {tmp}/r", ["--device nowhere", "--device cpu"]),
        ("train ppo --env recurl/TMaze-v0 --run-dir {tmp}/file/r", ["Can't write", "--run-dir"]),
        ("train ppo --env recurl/TMaze-v0 --run-dir {tmp}", ["is not empty and holds no run"]),
        ("train --resume {tmp}/none", ["holds no run"]),
        ("evaluate", ["Folder of the run. (required)"]),
        ("evaluate {tmp}/none", ["holds no run"]),
        ("export", ["Folder of the run. (required)"]),
        ("export {tmp}/none", ["holds no run"]),
        ("export {tmp}/none --format tf", ["--format", "onnx"]),
        ("export {tmp}/none --out policy.pt2", ["must end with .onnx"]),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, words):
    (tmp_path / "file").write_text("mine")
    fails(capsys, arguments.format(tmp=tmp_path).split(), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_missing_extra_names_its_pip_line(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "recurl.cli.evaluate", raising=False)
    monkeypatch.setitem(sys.modules, "tyro", None)
    fails(capsys, ["evaluate", "run"], "tyro is not installed: pip install 'recurl[train]'")


def test_another_missing_module_is_not_blamed_on_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "recurl.cli.evaluate", raising=False)
    monkeypatch.setitem(sys.modules, "recurl.trainers", None)
    with pytest.raises(ModuleNotFoundError, match=r"recurl\.trainers"):
        main(["evaluate", "run"])


def test_broken_runs(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    assert train(folder.path) == 0
    fails(capsys, ["evaluate", folder.path, "--episodes", "0"], "--episodes must be positive")
    options = folder.config.read_text()
    folder.config.write_text(options.replace('"hidden_size": 8', '"hidden_size": 9'))
    for command in (["evaluate", folder.path], ["train", "--resume", folder.path]):
        fails(capsys, command, "The checkpoint doesn't fit")
    folder.config.write_text(options)
    checkpoints = sorted(folder.checkpoints.iterdir())
    for path in checkpoints:
        path.write_bytes(path.read_bytes()[:100])
    for command in (["evaluate", folder.path], ["train", "--resume", folder.path]):
        fails(capsys, command, str(checkpoints[-1]), "is broken", "delete it")
    for path in checkpoints:
        path.unlink()
    for command in (["evaluate", folder.path], ["train", "--resume", folder.path]):
        fails(capsys, command, "There is no checkpoint in")
    folder.config.write_text("{")
    fails(capsys, ["train", "--resume", folder.path], "is not JSON")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_run_that_resumes(tmp_path, number, code):
    folder = RunFolder(tmp_path / "run")
    start = [
        sys.executable,
        "-m",
        "recurl",
        "train",
        "ppo",
        *SMALL,
        "--run-dir",
        str(folder.path),
        "--total-steps",
        "1000000",
    ]
    process = subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 60
    while not (folder.metrics.exists() and len(folder.metrics.read_text().splitlines()) > 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err == ""
    assert f"recurl train --resume {folder.path}" in out
    assert folder.curve.exists()
    rows = len(folder.metrics.read_text().splitlines()) - 1
    assert [path.stem for path in folder.checkpoints.iterdir()] == [f"{rows * 64:012d}"] or rows > 20
    folder.config.write_text(folder.config.read_text().replace("1000000", str((rows + 2) * 64)))
    assert main(["train", "--resume", str(folder.path)]) == 0
    assert len(folder.metrics.read_text().splitlines()) == rows + 3
