"""Sweeps as processes: running, continuing, failing, stopping, and rejected requests."""

import contextlib
import csv
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from recurl.cli import main
from recurl.trainers import RunFolder

pytestmark = pytest.mark.slow

SMALL = (  # noqa: SIM905 - reads as it is typed
    "--env recurl/TMaze-v0 --env-kwargs corridor_length=3 --num-envs 4 --rollout-steps 16 --minibatches 2 "
    "--hidden-size 8 --eval-episodes 2 --logger none"
).split()


def sweep(folder, *more, steps=256):
    return main(["sweep", "ppo", "--run-dir", str(folder), *SMALL, "--total-steps", str(steps), *more])


def results(folder):
    with (folder / "results.csv").open(newline="") as file:
        return {row["job"]: row for row in csv.DictReader(file)}


@pytest.mark.usefixtures("jobs_are_forks")
def test_train_resume_and_compare(tmp_path, capsys):
    folder = tmp_path / "sweep"
    assert sweep(folder, "--set", "cell=gru,none", "--jobs", "2") == 0
    said = capsys.readouterr().out
    assert "finished cell=gru,seed=0: training return " in said
    assert f"Compare them: recurl compare {folder}" in said
    assert {(row["cell"], row["status"], row["env_steps"]) for row in results(folder).values()} == {
        ("gru", "finished", "256"),
        ("none", "finished", "256"),
    }
    assert RunFolder(folder / "cell=none,seed=0").read_config().cell == "none"
    assert sweep(folder, "--set", "cell=gru,none", "--seeds", "2") == 0  # one more seed
    said = capsys.readouterr().out
    assert "4 runs, 2 already finished" in said
    assert said.count("started") == 2
    assert main(["compare", str(folder), "--out", str(tmp_path / "out.png")]) == 0
    *_, gru, none, _ = capsys.readouterr().out.splitlines()
    assert gru.split()[:2] == ["cell=gru", "2"]
    assert none.split()[:2] == ["cell=none", "2"]
    for more, said in (
        (["--set", "cell=gru,lstm"], "holds another sweep (cell: ['gru', 'none'], not ['gru', 'lstm'])"),
        (["--set", "cell=gru,none", "--gamma", "0.5"], "holds another sweep (gamma: 0.99, not 0.5)"),
        (["--set", "cell=gru,none", "--seed", "3"], "holds another sweep (seed: 0, not 3)"),
    ):
        assert sweep(folder, *more) == 2
        assert said in capsys.readouterr().err


@pytest.mark.usefixtures("jobs_are_forks")
def test_a_run_that_fails_is_named_and_the_rest_finished(tmp_path, capsys):
    folder = tmp_path / "sweep"
    assert sweep(folder, "--set", "env_kwargs=corridor_length=3,corridor_length=-1", "--jobs", "2") == 1
    said = capsys.readouterr().out
    assert "1 of 2 runs failed: env_kwargs=corridor_length=-1,seed=0. The same command retries them." in said
    assert "failed env_kwargs=corridor_length=-1,seed=0: recurl: --env recurl/TMaze-v0" in said
    assert {name: row["status"] for name, row in results(folder).items()} == {
        "env_kwargs=corridor_length=3,seed=0": "finished",
        "env_kwargs=corridor_length=-1,seed=0": "failed",
    }


def stop_when(path):
    """Send SIGTERM to this process once a file exists and signals are handled, as while a sweep runs."""
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("jobs_are_forks")
def test_a_stopped_sweep_is_resumed(tmp_path, capsys):
    folder = tmp_path / "sweep"
    stopping = threading.Thread(target=stop_when, args=(folder / "seed=0" / "metrics.csv",))
    stopping.start()
    assert sweep(folder, steps=10000000) == 143
    stopping.join()
    assert capsys.readouterr().out.splitlines()[-1] == "Run the same command to continue."
    assert results(folder)["seed=0"]["status"] == "stopped"
    assert list((folder / "seed=0" / "checkpoints").glob("*.pt"))
    (folder / "seed=0" / "config.json").write_text(
        (folder / "seed=0" / "config.json").read_text().replace('"total_steps": 10000000', '"total_steps": 64')
    )
    assert sweep(folder, steps=10000000) == 0
    assert "resumed seed=0" in capsys.readouterr().out


def trained_by(folder):
    """Return the ids of processes whose command line names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def begin(programs, folder, *more, rollout_steps="16"):
    """Start a long sweep in a session of its own, and return it once its first run has made updates."""
    words = [rollout_steps if word == "16" else word for word in SMALL]
    command = [sys.executable, "-m", "recurl", "sweep", "ppo", "--run-dir", str(folder), *words, *more]
    command += ["--total-steps", "10000000"]
    process = programs.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size > 500 for path in folder.glob("seed=0/metrics.csv")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.full
def test_the_runs_of_a_sweep_that_is_killed_stop_with_a_checkpoint(tmp_path, programs):
    folder = tmp_path / "sweep"
    process = begin(programs, folder, "--seeds", "2", "--jobs", "2")
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while trained_by(folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list((folder / "seed=0" / "checkpoints").glob("*.pt"))


@pytest.mark.full
@pytest.mark.usefixtures("jobs_are_forks")
def test_a_run_that_another_process_trains_is_waited_for(tmp_path, capsys, programs):
    folder, run = tmp_path / "sweep", RunFolder(tmp_path / "sweep" / "seed=0")
    assert sweep(folder) == 0
    (folder / "results.csv").unlink()
    capsys.readouterr()
    holder = "import sys; from pathlib import Path; from recurl.trainers import RunFolder\n"
    holder += "with RunFolder(Path(sys.argv[1])).hold(): print('held', flush=True); sys.stdin.readline()"
    with programs.Popen(
        [sys.executable, "-c", holder, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        threading.Timer(0.5, other.communicate, ("go\n",)).start()
        assert sweep(folder) == 0
    said = capsys.readouterr().out
    assert said.count(f"waiting for seed=0: Another process (pid {other.pid} on ") == 1
    assert said.index("waiting for seed=0") < said.index("resumed seed=0") < said.index("finished seed=0")
    assert results(folder)["seed=0"]["status"] == "finished"


@pytest.mark.full
def test_ctrl_c_in_the_terminal_of_a_sweep_leaves_checkpoints(tmp_path, programs):
    """Ctrl-C reaches all processes of the foreground group at once."""
    folder = tmp_path / "sweep"
    # An update takes longer than the sweep needs to forward the signal.
    process = begin(programs, folder, rollout_steps="2048")
    before = {path.name for path in folder.glob("seed=0/checkpoints/*.pt")}
    for pid in (process.pid, *trained_by(folder)):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == os.getpgid(process.pid):
                os.kill(pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert {path.name for path in folder.glob("seed=0/checkpoints/*.pt")} - before
    assert results(folder)["seed=0"]["status"] == "stopped"


def test_a_run_that_is_stopped_before_it_began_is_no_failure(tmp_path, programs):
    command = [sys.executable, "-m", "recurl", "sweep", "ppo", "--run-dir", str(tmp_path / "sweep"), *SMALL]
    process = programs.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "started" not in (line := process.stdout.readline()):
        assert line
    os.kill(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 143
    assert said.splitlines()[0].startswith("stopped seed=0")


def test_folders_that_are_something_else(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sweep.json").write_text("{")
    for name, message in (
        ("file", "is not a folder: name another with --run-dir"),
        ("full", "is not empty and holds no sweep"),
        ("broken", "sweep.json is not JSON"),
    ):
        assert sweep(tmp_path / name) == 2
        assert message in capsys.readouterr().err
