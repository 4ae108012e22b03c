import gc
import io
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from recurl import __version__
from recurl.cli import main
from recurl.cli.arguments import without_options
from recurl.trainers import RunFolder
from recurl.trainers.checkpoint import latest_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

SMALL = (  # noqa: SIM905 - reads as it is typed
    "--env recurl/RepeatPrevious-v0 --env-kwargs k=1 episode_length=8 --hidden-size 8 --num-envs 4 --rollout-steps 16 "
    "--sequence-length 8 --eval-episodes 3"
).split()
REPLAY = (  # noqa: SIM905 - reads as it is typed
    "--env recurl/RepeatPrevious-v0 --env-kwargs k=1 episode_length=8 --hidden-size 8 --num-envs 4 --rollout-steps 16 "
    "--slices 4 --slice-length 8 --burn-in 2 --learning-starts 64 --eval-episodes 3"
).split()

CONTINUOUS = (  # noqa: SIM905 - likewise
    "--env recurl/MaskedPendulum-v1 --env-kwargs max_episode_steps=8 --hidden-size 8 --num-envs 4 --rollout-steps 16 "
    "--slices 4 --slice-length 8 --burn-in 2 --learning-starts 64 --eval-episodes 3"
).split()


def train(folder, *more):
    words = ["train", "ppo", *SMALL, "--total-steps", "128", "--run-dir", str(folder)]
    return main([*without_options(words, more), *more])


def fails(capsys, arguments, *words):
    """Check that the command exits with 2 and one line on stderr that contains all words."""
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
    for words in ("Training recurl/RepeatPrevious-v0 with ppo (lstm)", "128/128 steps", "Finished after 128 steps"):
        assert words in said
    assert "s of CPU time" in said
    assert "setup" in said
    assert "Greedy evaluation over 3 episodes" in said
    assert main(["evaluate", str(tmp_path / "run"), "--episodes", "5", "--seed", "1"]) == 0
    assert "Greedy evaluation over 5 episodes" in capsys.readouterr().out


@pytest.mark.usefixtures("plots")
@pytest.mark.parametrize(
    ("algorithm", "shown"), [("dqn", "eps 0.05"), ("r2d2", "eps 0.05"), ("sac", "alpha 0.01"), ("td3", "noise 0.10")]
)
def test_train_from_replay_then_resume_then_evaluate(tmp_path, capsys, algorithm, shown):
    folder = str(tmp_path / "run")
    options = CONTINUOUS if algorithm == "td3" else REPLAY
    assert main(["train", algorithm, *options, "--total-steps", "256", "--run-dir", folder]) == 0
    said = capsys.readouterr().out
    for words in (f"with {algorithm} (lstm)", "256/256 steps", shown, "Finished after 256 steps", "Greedy"):
        assert words in said
    assert RunFolder(tmp_path / "run").curve.exists()
    assert main(["train", "--resume", folder]) == 0
    assert main(["evaluate", folder, "--episodes", "5"]) == 0
    assert "Greedy evaluation over 5 episodes" in capsys.readouterr().out


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ppo", *SMALL, "--total-steps", "64", "--cell", "gru", "--seed", "3"]) == 0
    assert RunFolder(tmp_path / "runs" / "RepeatPrevious-v0-ppo-gru-seed3").metrics.exists()
    named = ["recurl.envs:recurl/RepeatPrevious-v0" if word.startswith("recurl/") else word for word in SMALL]
    assert main(["train", "ppo", *named, "--total-steps", "64", "--cell", "none"]) == 0
    assert RunFolder(tmp_path / "runs" / "RepeatPrevious-v0-ppo-none-seed0").metrics.exists()
    named = ["recurl.envs.tasks:CartPole-v1" if word.startswith("recurl/") else word for word in SMALL]
    named = [word for word in named if "=" not in word and word != "--env-kwargs"]
    assert main(["train", "ppo", *named, "--total-steps", "64", "--cell", "none"]) == 0
    assert RunFolder(tmp_path / "runs" / "CartPole-v1-ppo-none-seed0").metrics.exists()


def test_default_folder_of_a_game(tmp_path, monkeypatch):
    pytest.importorskip("pettingzoo")
    monkeypatch.chdir(tmp_path)
    env = ["--env", "pettingzoo/pettingzoo.classic.rps.rps:parallel_env", "--num-envs", "4", "--cell", "none"]
    assert main(["train", "ppo", *env, "--rollout-steps", "8", "--total-steps", "32", "--eval-episodes", "2"]) == 0
    assert RunFolder(tmp_path / "runs" / "pettingzoo.classic.rps.rps-ppo-none-seed0").metrics.exists()


def test_a_run_is_not_overwritten_by_accident(run, capsys):
    words = ["train", "ppo", *SMALL, "--run-dir", run]
    fails(capsys, words, "already holds a run", "--resume", "--overwrite")
    assert train(run, "--overwrite") == 0


def test_a_finished_run_can_be_resumed(run, capsys):
    assert main(["train", "--resume", str(run)]) == 0
    assert "Finished after 128 steps" in capsys.readouterr().out


@pytest.mark.usefixtures("brief_verification")
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
        ("train cem", ["no algorithm 'cem'", "ppo, dqn, r2d2, a2c, impala, sac, td3"]),
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
        ("train td3 --env recurl/TMaze-v0 --run-dir {tmp}/r", ["TD3 needs Box actions with two finite bounds"]),
        ("train td3 --env Pendulum-v1 --noise-end 2", ["--noise-end must not exceed --noise-init, got 2.0 and 1.0"]),
        (
            "train sac --env Pendulum-v1 --refresh-states --start-state zero",
            ["--refresh-states stores", "--start-state"],
        ),
        ("train r2d2 --env recurl/TMaze-v0 --burn-in 40", ["--burn-in must be less than --slice-length"]),
        ("train ppo --env recurl/TMaze-v0 --backend magic --run-dir {tmp}/r", ["magic"]),
        ("train ppo --env recurl/TMaze-v0 --device nowhere --run-dir {tmp}/r", ["--device nowhere", "--device cpu"]),
        ("train ppo --env recurl/TMaze-v0 --run-dir {tmp}/file/r", ["Can't write", "--run-dir"]),
        ("train ppo --env recurl/TMaze-v0 --run-dir {tmp}", ["is not empty and holds no run"]),
        ("train ppo --env recurl/TMaze-v0 --learning-rate nan", ["--learning-rate must be a finite number, got nan"]),
        ("train ppo --env recurl/TMaze-v0 --entropy-coeff inf", ["--entropy-coeff must be a finite number, got inf"]),
        ("train ppo --env recurl/TMaze-v0 --max-grad-norm nan", ["--max-grad-norm must be a number, or inf"]),
        ("train ppo --env recurl/TMaze-v0 --seed 9223372036854775808", ["--seed must be at most"]),
        ("train ppo --env recurl/TMaze-v0 --threads 1000000", ["--threads must be at most 1,024"]),
        ("train ppo --env recurl/TMaze-v0 --device meta --run-dir {tmp}/r", ["--device meta can't be used"]),
        ("train ppo --env recurl/TMaze-v0 --device cpu:3 --run-dir {tmp}/r", ["--device cpu:3", "one CPU"]),
        ("train ppo --env recurl/TMaze-v0 --device hpu --run-dir {tmp}/r", ["--device hpu can't be used"]),
        ("train ppo --env recurl/TMaze-v0 --hidden-size 100000000 --run-dir {tmp}/r", ["GiB", "--hidden-size"]),
        ("train dqn --env recurl/TMaze-v0 --buffer-size 2000000000 --run-dir {tmp}/r", ["GiB", "--buffer-size"]),
        ("train ppo --env recurl/TMaze-v0 --env-kwargs k=1 k=2 --run-dir {tmp}/r", ["--env-kwargs got k twice"]),
        ("train ppo --env ..:x --run-dir {tmp}/r", ["--env ..:x can't be created, TypeError"]),
        ("train ppo --env CartPole-v1 --env-kwargs render_mode=x=1 --run-dir {tmp}/r", ["--env CartPole-v1", "render"]),
        ("train --resume {tmp}/none", ["holds no run"]),
        ("train --resume {tmp}/none --gamma 0.9", ["takes only", "got --gamma 0.9: leave it out", "(--init-from "]),
        ("train ppo --resume={tmp}/none", ["keeps its algorithm and options", "got ppo: leave it out"]),
        ("train --env recurl/TMaze-v0", ["needs an algorithm (ppo, ", "or --resume RUN"]),
        ("evaluate {tmp}/none --seed -1", ["--seed must not be negative, got -1"]),
        ("evaluate {tmp}/none --episodes 0", ["--episodes must be positive, got 0"]),
        ("export {tmp}/none --out {tmp}/nope/policy.onnx", ["There is no folder", "nope", "--out"]),
        ("evaluate", ["Run folder. (required)"]),
        ("evaluate {tmp}/none", ["holds no run"]),
        ("export", ["Run folder. (required)"]),
        ("export {tmp}/none", ["holds no run"]),
        ("export {tmp}/none --format tf", ["--format", "onnx"]),
        ("export {tmp}/none --out policy.pt2", ["must end with .onnx"]),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, words):
    (tmp_path / "file").write_text("mine")
    fails(capsys, arguments.format(tmp=tmp_path).split(), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["\udcff", "a\0b"])
@pytest.mark.parametrize("words", ["train ppo --env x --run-dir", "evaluate", "bench rnn --out", "doctor", "", "fly"])
def test_arguments_that_are_no_text(capsys, words, name):
    fails(capsys, [*words.split(), name], "Arguments must", ascii(name)[1:-1])


def test_no_memory_is_one_line(capsys, tmp_path, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    room = used + 2**30
    words = [
        *without_options(SMALL, ["--hidden-size"]),
        "--hidden-size",
        "6000",
        "--run-dir",
        tmp_path / "run",
        "--total-steps",
        "64",
    ]
    resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
    try:
        fails(capsys, ["train", "ppo", *words], "There is not enough memory, reduce the sizes")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


FAILING = "tests.cli.exiting:recurl-test/Failing-v0"


@pytest.mark.usefixtures("shared_interpreter", "forked_environments")
@pytest.mark.parametrize(
    ("options", "source"),
    [
        ("", "The environment"),
        ("--vectorization sync", "The environment"),
        ("--vectorization async", r"Worker [01] \(process \d+\)"),  # both fail at this step
        ("--env-workers 1", r"Worker 0 \(process \d+\)"),
        ("--overlap", r"Worker 0 \(process \d+\)"),
    ],
)
def test_an_error_of_an_environment_is_two_lines_and_a_file(tmp_path, capsys, monkeypatch, options, source):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = f"train ppo --env {FAILING} --num-envs 2 --minibatches 1 --rollout-steps 2"
    run = tmp_path / "run"
    words += f" --total-steps 64 --checkpoint-every 1 --run-dir {run} {options}"
    assert main(words.split()) == 2
    first, second = capsys.readouterr().err.splitlines()
    found = re.fullmatch(
        rf"recurl: {source} raised KeyError: 'the wheel\\ncame off'\. Resume from the newest checkpoint, at (\d+) "
        rf"steps: recurl train --resume {run} --trust-run",
        first,
    )
    assert int(found[1]) == int(latest_checkpoint(run / "checkpoints").stem) > 0
    name = re.fullmatch(rf"recurl: the traceback is in ({tmp_path}/recurl-traceback-\w+\.txt)", second)[1]
    trace = Path(name).read_text()
    assert trace.startswith("Traceback (most recent call last):\n")
    assert trace.endswith("KeyError: 'the wheel\\ncame off'\n")
    assert " in step\n" in trace


def test_an_error_of_an_environment_in_an_evaluation(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = f"train ppo --env {FAILING} --env-kwargs at=12 end=4 --num-envs 2 --minibatches 1 --rollout-steps 2"
    run = str(tmp_path / "run")
    assert main([*words.split(), "--total-steps", "8", "--eval-episodes", "1", "--run-dir", run]) == 0
    capsys.readouterr()
    assert main(["evaluate", run, "--episodes", "30", "--trust-run"]) == 0
    assert main(["evaluate", run, "--episodes", "500", "--trust-run"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "recurl: The environment raised KeyError: 'the wheel\\ncame off'"
    assert second.startswith("recurl: the traceback is in ")


def test_a_norm_without_bound(tmp_path):
    assert train(tmp_path / "run", "--max-grad-norm", "inf") == 0
    assert RunFolder(tmp_path / "run").read_config().max_grad_norm == math.inf


def test_a_missing_extra_names_its_pip_line(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "recurl.cli.evaluate", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    fails(capsys, ["evaluate", "run"], "rich is not installed: pip install 'recurl[train]'")


def test_another_missing_module_is_not_blamed_on_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "recurl.cli.evaluate", raising=False)
    monkeypatch.setitem(sys.modules, "recurl.trainers", None)
    with pytest.raises(ModuleNotFoundError, match=r"recurl\.trainers"):
        main(["evaluate", "run"])


def test_broken_runs(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    assert train(folder.path) == 0
    commands = (["evaluate", folder.path], ["export", folder.path], ["train", "--resume", folder.path])
    fails(capsys, ["evaluate", folder.path, "--episodes", "0"], "--episodes must be positive")
    options = folder.config.read_text()
    folder.config.write_text(options.replace('"hidden_size": 8', '"hidden_size": 9'))
    for command in commands:
        fails(capsys, command, "000000000128.pt doesn't fit the run's config.json: RuntimeError: Error(s) in loading")
    folder.config.write_text(options.replace('"num_envs": 4', '"num_envs": 2'))
    fails(capsys, commands[-1], "config.json doesn't fit the checkpoint: num_envs must stay 4, got 2")
    folder.config.write_text(options)
    for path in folder.checkpoints.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    for command in commands:
        fails(capsys, command, "000000000128.pt is broken or not a checkpoint", "There is no other: restore one")
    for path in folder.checkpoints.iterdir():
        path.unlink()
    for command in commands:
        fails(capsys, command, "There is no checkpoint in")
    folder.config.write_text("{")
    fails(capsys, commands[-1], "is not JSON")


@pytest.mark.usefixtures("brief_verification")
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    assert train(folder.path, "--checkpoint-every", "1") == 0
    newest = latest_checkpoint(folder.checkpoints)
    good = newest.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 3] ^= 4
    newest.write_bytes(flipped)
    for command in (["evaluate", folder.path, "--episodes", "2"], ["export", folder.path, "--format", "torch"]):
        capsys.readouterr()
        assert main([str(word) for word in command]) == 0
        (notice,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Notice")]
        assert notice.startswith(f"Notice: The checkpoint {newest} is broken or not a checkpoint (")
        assert notice.endswith("Using the previous one, 000000000064.pt.")
    rows = folder.metrics.read_text()
    assert main(["train", "--resume", str(folder.path)]) == 0
    assert "Using the previous one, 000000000064.pt" in capsys.readouterr().out
    assert [line.split(",")[1] for line in folder.metrics.read_text().splitlines()] == ["env_steps", "64", "128"]
    assert folder.metrics.read_text().splitlines()[1] == rows.splitlines()[1]
    assert [path.name for path in sorted(folder.checkpoints.iterdir())] == ["000000000064.pt", newest.name]
    agents = [
        torch.load(io.BytesIO(data), weights_only=True)["algorithm"]["agent"] for data in (good, newest.read_bytes())
    ]
    assert all(torch.equal(agents[0][name], agents[1][name]) for name in agents[0])


def test_rows_that_are_lost_are_no_reason_to_stop(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    assert train(folder.path, "--total-steps", "256") == 0
    folder.config.write_text(folder.config.read_text().replace('"total_steps": 256', '"total_steps": 384'))
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(lines[:3])[:-7])
    assert main(["train", "--resume", str(folder.path)]) == 0
    assert (
        f"Notice: {folder.metrics} contains rows for 1 of the 4 updates before the checkpoint"
        in capsys.readouterr().out
    )
    rows = [line.split(",")[:2] for line in folder.metrics.read_text().splitlines()[1:]]
    assert rows == [["1", "64"], ["5", "320"], ["6", "384"]]
    folder.metrics.write_text("a,b\n1,2\n")
    fails(capsys, ["train", "--resume", folder.path], "metrics.csv must have the columns", "move it away")


def test_a_folder_in_which_another_process_works_is_left_alone(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}
    with RunFolder(run).hold():
        for command in (["train", "--resume", run], ["train", "ppo", *SMALL, "--run-dir", run, "--overwrite"]):
            fails(capsys, command, f"Another process (pid {os.getpid()} on ", f") is using {run}: wait until it ends")
        assert main(["evaluate", str(run), "--episodes", "2"]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}


@pytest.mark.parametrize(
    ("limit", "every", "file"), [(100, 1, "config.json"), (2500, 100, "tensorboard/events"), (6000, 1, "checkpoints/")]
)
def test_no_room(tmp_path, capsys, limit, every, file):
    """If a file can't grow, the error names it and gives advice, and saved data stays valid."""
    folder = RunFolder(tmp_path / "run")
    words = ["--checkpoint-every", str(every), "--total-steps", "1280"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        assert train(folder.path, *words) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"recurl: Can't write {folder.path}/")
    for word in (file, "File too large", "raise the file size limit (ulimit -f)"):
        assert word in said
    assert list(tmp_path.rglob("*.partial")) == []
    if folder.checkpoints.exists() and list(folder.checkpoints.iterdir()):
        assert f"recurl train --resume {folder.path}" in said
        assert main(["train", "--resume", str(folder.path)]) == 0


def test_no_space_for_metrics_after_a_checkpoint(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    assert train(folder.path, "--checkpoint-every", "1", "--total-steps", "640") == 0
    folder.config.write_text(folder.config.read_text().replace('"total_steps": 640', '"total_steps": 1280'))
    size = folder.metrics.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, before[1]))
    try:
        assert main(["train", "--resume", str(folder.path)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert "Resume from the newest checkpoint, at 640 steps: recurl train --resume" in said
    assert main(["train", "--resume", str(folder.path)]) == 0
    assert [line.split(",")[0] for line in folder.metrics.read_text().splitlines()[1:]] == [
        str(n) for n in range(1, 21)
    ]


def test_numbers_that_are_not_finite_end_a_run_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    words = [*SMALL[2:], "--env", "tests.trainers.faulty:recurl-test/Faulty-v0", "--checkpoint-every", "1"]
    words[0:3] = []
    command = [
        "train",
        "ppo",
        *words,
        "--env-kwargs",
        "steps=20",
        "--total-steps",
        "256",
        "--run-dir",
        tmp_path / "run",
    ]
    fails(
        capsys,
        command,
        "The reward of environment 1 at step 3 of its batch (environment step 78) was nan, but only finite",
        "Fix the environment, lower --learning-rate, or skip such data (--on-nonfinite skip).",
        f"Resume from the newest checkpoint, at 64 steps: recurl train --resume {tmp_path / 'run'}",
    )
    assert main([str(word) for word in [*command, "--overwrite", "--on-nonfinite", "skip"]]) == 0


def test_an_evaluation_of_episodes_that_never_end(tmp_path, capsys):
    folder = tmp_path / "run"
    small = [word.replace("episode_length=8", "episode_length=100000") for word in SMALL]
    assert (
        main(["train", "ppo", *small, "--eval-max-steps", "40", "--total-steps", "64", "--run-dir", str(folder)]) == 0
    )
    assert "length 40; 3 of 3 episodes were cut after 40 steps" in capsys.readouterr().out
    assert main(["evaluate", str(folder), "--episodes", "2", "--max-steps", "30"]) == 0
    assert "2 of 2 episodes were cut after 30 steps" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_run_that_resumes(tmp_path, programs, number, code):
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
    process = programs.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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


def test_imports_of_a_new_process_are_not_searched_for_garbage() -> None:
    code = "import gc, sys; from recurl.cli.main import main; code = main(['cache', 'show']); "
    code += "print(code, gc.isenabled(), gc.get_freeze_count() > 100_000, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 True True True"
    count = gc.get_freeze_count()
    assert main(["cache", "show"]) == 0  # this process has imported torch before
    assert gc.get_freeze_count() <= count
