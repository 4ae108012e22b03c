import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from recurl.cli import main
from recurl.experiments.jobs import gpus_for, train_all
from recurl.experiments.popgym.score import MaxMeanReturn


def small(seeds=2, steps=256):
    return (
        f"bench memory --device cpu --steps {steps} --seeds {seeds} --set num_envs=4 rollout_steps=16 "
        "sequence_length=16 epochs=1 minibatches=2 hidden_size=8 encoder_width=8 head_width=8"
    ).split()


SMALL = small()
TWO = ["--tasks", "EndlessTMaze", "RepeatPrevious4"]


def rows(folder):
    with (folder / "memory.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def keys(folder):
    return [(row["task"], row["cell"], row["seed"]) for row in rows(folder)]


@pytest.mark.slow
def test_resumes_with_more_cells_and_shows_the_table(tmp_path, capsys):
    arguments = [*SMALL, *TWO, "--out", str(tmp_path), "--cells"]
    assert main([*arguments, "gru"]) == 0
    assert keys(tmp_path)[:2] == [("RepeatPrevious4", "gru", "0"), ("EndlessTMaze", "gru", "0")]
    assert main([*arguments, "gru", "lstm", "none"]) == 2
    assert "memory.csv holds results: continue with --resume" in capsys.readouterr().err
    before = rows(tmp_path)
    assert main([*arguments, "gru", "lstm", "none", "--resume"]) == 0
    said = capsys.readouterr().out
    assert "12 runs, 4 already finished" in said
    assert rows(tmp_path)[:4] == before
    assert len(set(keys(tmp_path))) == 12
    for row in rows(tmp_path):
        assert row["env_steps"] == row["steps"] == "256"
        assert abs(int(row["parameters"]) / int(row["reference"]) - 1) < 0.1
        assert -10 < float(row["mean"]) <= float(row["best"]) < 1
    table = said[said.index("Return of 100") :]
    assert "mean of 2 tasks, normalized from 0 to 1" in table
    assert "Missing" not in table
    assert main([*SMALL, *TWO, "--out", str(tmp_path), "--table"]) == 0
    assert capsys.readouterr().out == table
    assert main([*small(seeds=3), *TWO, "--out", str(tmp_path), "--table"]) == 0
    assert "Missing: 6 of 18 runs: RepeatPrevious4 gru seed 2, " in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} <= {"memory.csv", ".lock"}


@pytest.mark.slow
def test_rows_of_other_settings_stay_and_count_for_nothing(tmp_path, capsys):
    arguments = ["--tasks", "RepeatPrevious4", "--cells", "none", "--out", str(tmp_path)]
    assert main([*small(1), *arguments]) == 0
    assert main([*small(1, steps=128), *arguments, "--resume"]) == 0
    assert main([*small(1), *arguments, "--resume", "--set", "gamma=0.5"]) == 0
    said = capsys.readouterr().out
    assert said.count("1 runs, 0 already finished") == 3
    assert said.endswith("Left out: 2 results of other tasks, cells, seeds or settings.\n")
    assert len(rows(tmp_path)) == 3


def test_a_budget_stops_after_the_run_that_exceeds_it(tmp_path, capsys):
    arguments = [*SMALL, *TWO, "--cells", "none", "--out", str(tmp_path), "--budget", "0.001"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "The budget of 0.001 s is spent: 3 runs are left for --resume." in said
    assert "Not in the means, as a cell has no score: EndlessTMaze." in said
    assert len(rows(tmp_path)) == 1


@pytest.mark.slow
def test_the_tasks_of_popgym_and_what_was_tuned_on_them(tmp_path, capsys):
    arguments = [*small(1), "--suite", "popgym", "--tasks", "CountRecallEasy", "RepeatFirst"]
    assert main([*arguments, "--cells", "gru", "none", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "mean of 1 task  " in said
    assert "No episode ended in training: 4 of 8 runs: RepeatFirstMedium gru seed 0, " in said
    assert "Not scored, as options were tuned on them: CountRecallEasy." in said
    assert "the paper, its tasks with mazes (unverified)" in said
    assert len(rows(tmp_path)) == 8


@pytest.mark.slow
def test_a_signal_loses_one_run(tmp_path, capsys, monkeypatch):
    arguments = [*SMALL, *TWO, "--cells", "none", "--out", str(tmp_path)]
    seen, usual = [], MaxMeanReturn.on_batch

    def interrupted(self, batch):
        usual(self, batch)
        seen.append(self)
        if len(set(map(id, seen))) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(MaxMeanReturn, "on_batch", interrupted)
    assert main(arguments) == 130
    assert len(rows(tmp_path)) == 1
    assert "Stopped. Continue with --resume." in capsys.readouterr().out
    monkeypatch.undo()
    assert main([*arguments, "--resume"]) == 0
    assert len(rows(tmp_path)) == 4


@pytest.mark.full
@pytest.mark.slow
def test_a_killed_benchmark_resumes_and_leaves_nothing_behind(tmp_path, programs):
    command = [sys.executable, "-m", "recurl", *small(20), *TWO, "--cells", "none", "--out", str(tmp_path)]
    process = programs.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("3/40"):
        assert line
    process.kill()
    process.communicate(timeout=60)
    finished = rows(tmp_path)
    assert 3 <= len(finished) < 40
    (tmp_path / "bench-memory-runs" / "left-over").mkdir(parents=True, exist_ok=True)
    assert main([*SMALL, *TWO, "--cells", "none", "--out", str(tmp_path), "--resume"]) == 0
    assert rows(tmp_path)[: len(finished)] == finished
    assert len(rows(tmp_path)) == max(4, len(finished))
    assert {path.name for path in tmp_path.iterdir()} <= {"memory.csv", ".lock"}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_several_jobs_give_the_same_rows(tmp_path):
    arguments = [*SMALL, *TWO, "--cells", "gru", "none"]
    assert main([*arguments, "--out", str(tmp_path / "one"), "--jobs", "1"]) == 0
    assert main([*arguments, "--out", str(tmp_path / "two"), "--jobs", "2"]) == 0
    found = [
        sorted([value for name, value in row.items() if name not in ("wall_s", "date")] for row in rows(tmp_path / out))
        for out in ("one", "two")
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 8


class SeesGPU(NamedTuple):
    """Work whose result is the GPU that its process sees."""

    def train(self, run: int, on_speed: object, should_stop: object) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("shared_interpreter")
def test_jobs_are_divided_among_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert gpus_for("cuda") == ("4", "7")
    seen = train_all(
        range(8), SeesGPU(), 4, cores=4, gpus=gpus_for("cuda"), on_speed=lambda _: None, should_stop=lambda: False
    )
    assert {gpu for _, gpu in seen} == {"4", "7"}
    seen = train_all(range(2), SeesGPU(), 2, cores=2, on_speed=lambda _: None, should_stop=lambda: False)
    assert {gpu for _, gpu in seen} == {"4,7"}


def test_a_run_that_fails_does_not_end_the_others(tmp_path, capsys):
    arguments = [*SMALL, "learning_rate=1e30", "--cells", "none", "--tasks", "RepeatPrevious4"]
    assert main([*arguments, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.endswith(
        "2 runs failed: RepeatPrevious4 none seed 0, RepeatPrevious4 none seed 1. --resume retries them.\n"
    )
    assert not (tmp_path / "memory.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--cells gruu", "There is no cell 'gruu'. Did you mean gru?"),
        ("--tasks TMaze20", "--tasks: core has no task 'TMaze20', but MaskedCartPole, "),
        ("--suite popgym --tasks RepeatPrevios", "there is no task 'RepeatPrevios'. Did you mean RepeatPrevious?"),
        ("--suite atari", "invalid choice 'atari' for argument '--suite'"),
        ("--set epoch=3", "ppo has no option 'epoch'. Did you mean epochs?"),
        ("--set cell=gru", "--set can't set cell, which the benchmark sets itself"),
        ("--set checkpoint_every=5", "--set can't set checkpoint_every, which the benchmark sets itself"),
        ("--steps 100", "--steps must cover one batch of 32768 steps (256 environments x 128), got 100: raise it"),
        ("--seeds 0", "--seeds must be positive"),
        ("--budget 0", "--budget must be positive"),
        ("--device abacus", "--device abacus can't be used"),
        ("--table --resume --budget 60", "--table trains nothing: leave out --resume and --budget, or --table"),
        ("--table", "memory.csv holds no results of these tasks yet: train some, without --table"),
        ("--out {tmp}/file/x", "{tmp}/file"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, words):
    (tmp_path / "file").write_text("")
    words = words.format(tmp=tmp_path)
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    assert main(["bench", "memory", *out, *arguments.format(tmp=tmp_path).split()]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert words in said
    assert not Path(tmp_path / "out" / "memory.csv").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("task", "TMaze11", "there is no task 'TMaze11'"),
        ("greedy", "nan", "greedy must be finite, not nan"),
        ("reference", "0", "reference must be positive, not 0"),
        ("parameters", "-3", "parameters must be positive, not -3"),
    ],
)
def test_rows_that_can_not_be_shown_are_named(tmp_path, capsys, name, value, words):
    with (Path(__file__).parents[2] / "benchmarks/results/memory.csv").open(newline="") as file:
        row = next(csv.DictReader(file)) | {name: value}
    with (tmp_path / "memory.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    assert main(["bench", "memory", "--out", str(tmp_path), "--table"]) == 2
    assert f"holds a row that can't be read ({words}): fix or remove it" in capsys.readouterr().err


def test_runs_of_other_commands_in_the_folder_are_left_alone(tmp_path):
    """``recurl train`` keeps its own in ``runs`` of the working directory, which may be the folder of results."""
    kept = tmp_path / "runs" / "mine"
    kept.mkdir(parents=True)
    assert main([*small(1, steps=64), "--tasks", "RepeatPrevious4", "--cells", "none", "--out", str(tmp_path)]) == 0
    assert kept.is_dir()


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("away.module:Cell", "No module named 'away'"),
        ("gru*0", "a cell must have at least one layer, got 'gru*0': write gru."),
        ("none*2", "none has no layers, got 'none*2'"),
    ],
)
def test_results_of_a_cell_that_is_not_here_name_the_way_out(tmp_path, capsys, cell, why):
    arguments = [*small(1, steps=64), "--tasks", "RepeatPrevious4", "--out", str(tmp_path)]
    assert main([*arguments, "--cells", "none"]) == 0
    table = tmp_path / "memory.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines, lines[1].replace(",none,", f",{cell},", 1)]))
    assert main([*arguments, "--table"]) == 2
    said = capsys.readouterr().err
    assert f"{table} holds results of the cell {cell!r}, which can't be loaded here." in said
    assert why in said
    assert main([*arguments, "--table", "--cells", "none"]) == 0
