import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from recurl.cli import main
from recurl.experiments.popgym.results import Results
from recurl.experiments.popgym.score import MaxMeanReturn

SMALL = (  # noqa: SIM905 - reads as it is typed
    "bench popgym --device cpu --budget 256 --set num_envs=4 rollout_steps=16 sequence_length=16 epochs=1 "
    "minibatches=2 hidden_size=8 encoder_width=8 head_width=8"
).split()


def rows(folder):
    with (folder / "popgym.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_continues_with_more_cells_and_shows_the_table(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert main([*SMALL, "--cells", "gru", "--tasks", "MineSweeperEasy", "BattleshipEasy", *out]) == 0
    assert "steps/s all runs take" in capsys.readouterr().out
    assert main([*SMALL, "--cells", "gru", "none", "--tasks", "MineSweeperEasy", "BattleshipEasy", *out]) == 0
    said = capsys.readouterr().out
    assert "4 runs, 2 already finished" in said
    assert "mean of 2 of 48 tasks" in said
    found = rows(tmp_path)
    assert [(row["task"], row["cell"]) for row in found] == [
        ("BattleshipEasy", "gru"),
        ("MineSweeperEasy", "gru"),
        ("BattleshipEasy", "none"),
        ("MineSweeperEasy", "none"),
    ]
    assert all(-2 < float(row["mmer"]) < 1 for row in found)
    assert {row["env_steps"] for row in found} == {"256"}
    assert (tmp_path / "popgym.png").exists()
    assert not list((tmp_path / "runs").iterdir())


def test_a_cell_of_ones_own_and_kept_runs(tmp_path):
    arguments = [*SMALL, "--cells", "tests.own_cells:FastWeights", "--tasks", "MineSweeperEasy", "--keep-runs"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert rows(tmp_path)[0]["cell"] == "tests.own_cells:FastWeights"
    (run,) = (tmp_path / "runs").iterdir()
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0


@pytest.mark.slow
def test_a_signal_stops_it_and_loses_one_run_at_most(tmp_path, capsys, monkeypatch):
    arguments = [*SMALL, "--cells", "none", "--tasks", "MineSweeper", "--out", str(tmp_path)]
    seen, usual = [], MaxMeanReturn.on_batch

    def interrupted(self, batch):
        usual(self, batch)
        seen.append(self)
        if len(set(map(id, seen))) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(MaxMeanReturn, "on_batch", interrupted)
    assert main(arguments) == 130
    assert len(rows(tmp_path)) == 1
    assert "Run the same command to continue" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(arguments) == 0
    assert len(rows(tmp_path)) == 3


def test_a_run_that_is_not_finite_does_not_end_the_others(tmp_path, capsys):
    arguments = [*SMALL, "learning_rate=1e30", "--cells", "none", "--tasks", "MineSweeper", "--out", str(tmp_path)]
    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert "3 runs failed: MineSweeperEasy none seed 0, " in said
    assert not (tmp_path / "popgym.csv").exists()


def scores(folder):
    """Return the rows of a table in order, without values that differ between executions."""
    found = [{name: value for name, value in row.items() if name not in ("wall_s", "date")} for row in rows(folder)]
    return sorted(found, key=lambda row: (row["task"], row["cell"]))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_several_jobs_give_the_same_rows(tmp_path, capsys):
    arguments = [*SMALL, "--cells", "gru", "none", "--tasks", "MineSweeperEasy", "RepeatFirstEasy"]
    assert main([*arguments, "--out", str(tmp_path / "one"), "--jobs", "1"]) == 0
    torch.manual_seed(5)
    assert main([*arguments, "--out", str(tmp_path / "two"), "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("steps/s all runs take") == 2
    assert re.findall(r"^(\d)/4 .* MMER", said, re.MULTILINE) == ["1", "2", "3", "4"] * 2
    assert len(scores(tmp_path / "one")) == 4
    assert scores(tmp_path / "two") == scores(tmp_path / "one")
    assert not list((tmp_path / "two" / "runs").iterdir())


TROUBLE = "callback=('tests.cli.test_bench_popgym:Trouble',)"


class Trouble:
    """Callback that exits the process in one task and fails in another."""

    def on_start(self, trainer):
        if "Medium" in trainer.config.env_name:
            os.kill(os.getpid(), signal.SIGKILL)
        if "Hard" in trainer.config.env_name:
            raise ZeroDivisionError("as requested")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_a_job_that_dies_or_fails_is_named_and_the_others_continue(tmp_path, capsys):
    arguments = [*SMALL, TROUBLE, "--cells", "none", "--out", str(tmp_path), "--jobs", "2", "--tasks"]
    assert main([*arguments, "MineSweeper", "RepeatFirstEasy"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"/4 MineSweeperMedium none seed 0 failed: Worker \d .* was killed by SIGKILL", said)
    assert re.search(r"/4 MineSweeperHard none seed 0 failed: .* as requested", said)
    last = said.splitlines()[-1]
    assert "2 runs failed: MineSweeper" in last
    assert "The same command retries them." in last
    assert {row["task"] for row in rows(tmp_path)} == {"MineSweeperEasy", "RepeatFirstEasy"}


def test_a_run_that_fails_does_not_end_the_others(tmp_path, capsys):
    arguments = [*SMALL, TROUBLE, "--cells", "none", "--out", str(tmp_path)]
    assert main([*arguments, "--tasks", "MineSweeperHard", "MineSweeperEasy"]) == 1
    said = capsys.readouterr().out
    assert "MineSweeperHard none seed 0 failed: CallbackError: " in said
    assert "1 run failed: MineSweeperHard none seed 0. " in said
    assert [row["task"] for row in rows(tmp_path)] == ["MineSweeperEasy"]


def test_an_unforeseen_error_leaves_its_traceback(tmp_path, capsys, monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError("as requested")

    monkeypatch.setattr(MaxMeanReturn, "__init__", broken)
    assert main([*SMALL, "--cells", "none", "--tasks", "MineSweeperHard", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    found = re.search(r"seed 0 failed: ZeroDivisionError: as requested \(the traceback is in (.*)\)", said)
    assert found is not None
    assert 'raise ZeroDivisionError("as requested")' in Path(found[1]).read_text()
    Path(found[1]).unlink()


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_a_signal_stops_all_jobs_and_keeps_finished_results(tmp_path, capsys, monkeypatch):
    arguments = [*SMALL, "--cells", "none", "--tasks", "MineSweeper", "--out", str(tmp_path), "--jobs", "2"]
    usual = Results.add

    def interrupted(self, result):
        usual(self, result)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Results, "add", interrupted)
    before = descendants(os.getpid())
    assert main(arguments) == 130
    assert 1 <= len(rows(tmp_path)) <= 2
    assert "Run the same command to continue" in capsys.readouterr().out
    assert descendants(os.getpid()) == before


def children(parent):
    """Return the process ids of the children of a process."""
    found = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def descendants(parent):
    """Return the process ids of the children of a process, and of their children."""
    return [pid for child in children(parent) for pid in (child, *descendants(child))]


@pytest.mark.slow
@pytest.mark.full
def test_no_job_outlives_the_command(tmp_path, programs):
    command = [sys.executable, "-m", "recurl", *SMALL, "--cells", "none", "--tasks", "MineSweeper", "--jobs", "2"]
    command[command.index("256")] = "100000000"
    process = programs.Popen([*command, "--out", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "all runs take" not in (line := process.stdout.readline()):
        assert line
    (interpreter,) = children(process.pid)
    jobs = [interpreter, *children(interpreter)]
    assert len(jobs) == 3
    process.kill()
    process.communicate(timeout=60)
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in jobs):
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--cells gruu", "There is no cell 'gruu'. Did you mean gru?"),
        ("--tasks RepeatPrevios", "there is no task 'RepeatPrevios'. Did you mean RepeatPrevious?"),
        ("--set epoch=3", "ppo has no option 'epoch'. Did you mean epochs?"),
        ("--set cell=gru", "--set can't set cell, which the benchmark sets itself"),
        ("--set epochs=0.5", "--epochs must be a whole number"),
        ("--budget 100", "--budget must cover one batch of 32768 steps (256 environments x 128), got 100: raise it"),
        ("--set num_envs=many", "--num-envs must be"),
        ("--setting papers", "Did you mean paper?"),
        ("--cells", "--cells needs at least one cell"),
        ("--jobs 0", "--jobs must be positive"),
        ("--jobs many", "Error parsing --jobs: must be a whole number, such as 5000, 10k, 2M or 1e6, got 'many' (see"),
        ("--device abacus", "--device abacus can't be used"),
        ("--out {tmp}/file/x", "{tmp}/file"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, words):
    (tmp_path / "file").write_text("")
    words = words.format(tmp=tmp_path)
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    assert main(["bench", "popgym", *out, *arguments.format(tmp=tmp_path).split()]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert words in said
