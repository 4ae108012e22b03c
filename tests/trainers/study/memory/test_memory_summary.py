from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from recurl.core.errors import ArgumentError, StorageError
from recurl.experiments.memory.suites import find_tasks, make_runs
from recurl.experiments.memory.summary import MemorySummary
from recurl.experiments.memory.training import MemoryResult
from recurl.experiments.popgym.settings import setting
from recurl.experiments.results import ResultsFile
from recurl.trainers.study.statistics import hierarchical_interval

TASKS = find_tasks("core", ["TMaze10", "RepeatPrevious4"])
RUNS = make_runs(TASKS, ["gru", "none"], 2, setting("fast", {}), changes={}, steps=None, device="cpu")


def result(run, greedy):
    return MemoryResult(
        task=run.task,
        cell=run.cell,
        options=run.options,
        hidden_size=256,
        parameters=990,
        reference=1000,
        seed=run.seed,
        steps=run.config.total_steps,
        greedy=greedy,
        best=0.9,
        mean=0.1,
        episodes=7,
        env_steps=1000,
        wall_s=1.5,
        device="a CPU",
        versions="recurl 1",
        commit="",
        date="2026-01-01",
    )


def summary(scores):
    rows = [result(run, scores[run.task, run.cell]) for run in RUNS if (run.task, run.cell) in scores]
    return MemorySummary("core", TASKS, RUNS, rows)


def test_scores_are_normalized_and_clipped():
    made = summary({("TMaze10", "gru"): 0.75, ("TMaze10", "none"): -40.0, ("RepeatPrevious4", "gru"): 1.0})
    assert made.normalized("TMaze10", "gru").tolist() == [0.5, 0.5]
    assert made.normalized("TMaze10", "none").tolist() == [0.0, 0.0]
    assert made.common == ["TMaze10"]
    assert made.missing == ["RepeatPrevious4 none seed 0", "RepeatPrevious4 none seed 1"]
    text = made.table()
    assert "mean of 1 task, normalized from 0 to 1" in text
    assert "Not in the means, as a cell has no score: RepeatPrevious4." in text
    assert "Missing: 2 of 8 runs: RepeatPrevious4 none seed 0, RepeatPrevious4 none seed 1." in text
    assert "-1.0%" in text


def test_results_of_other_settings_are_left_out():
    rows = [result(RUNS[0], 0.5), replace(result(RUNS[0], 1.0), steps=1), replace(result(RUNS[0], 1.0), options="")]
    made = MemorySummary("core", TASKS, RUNS, rows)
    assert made.scores == {(RUNS[0].task, "gru"): [0.5]}
    assert made.others == 2


def test_results_of_several_versions_are_named():
    rows = [result(RUNS[0], 0.5), replace(result(RUNS[1], 0.5), versions="recurl 2")]
    text = MemorySummary("core", TASKS, RUNS, rows).table()
    assert "Of several versions, whose scores may differ: recurl 1, recurl 2." in text
    assert "Of several versions" not in MemorySummary("core", TASKS, RUNS, rows[:1]).table()


def test_a_run_without_finished_episodes_has_no_score():
    tasks = find_tasks("popgym", ["RepeatFirstEasy"])
    runs = make_runs(tasks, ["none"], 2, setting("fast", {}), changes={}, steps=None, device="cpu")
    rows = [replace(result(runs[0], 0.5), best=math.nan), result(runs[1], 0.5)]
    made = MemorySummary("popgym", tasks, runs, rows)
    assert made.scores == {("RepeatFirstEasy", "none"): [0.9]}
    text = made.table()
    assert "nan" not in text
    assert "No episode ended in training: 1 of 2 runs: RepeatFirstEasy none seed 0." in text


def test_one_run_has_no_interval():
    rows = [result(run, 0.5) for run in RUNS if run.task == RUNS[0].task and not run.seed]
    lines = MemorySummary("core", TASKS, RUNS, rows).table().splitlines()
    intervals = [line.split("  ")[-1].strip() for line in lines if "95% interval" in line]
    assert intervals == ["one seed", "one run", "one seed"]


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [result(run, 0.5) for run in RUNS]
    file = ResultsFile(tmp_path / "memory.csv", MemoryResult, "recurl bench memory")
    left = tmp_path / "memory.csv.4711.partial"
    left.write_text("task,ce")  # by a process that was killed
    for row in rows:
        file.add(row)
    assert not left.exists()
    assert ResultsFile(tmp_path / "memory.csv", MemoryResult, "recurl bench memory").rows == rows
    path = tmp_path / "memory.csv"
    path.write_text(path.read_text().replace("TMaze10,", "TMaze11,"))
    with pytest.raises(ArgumentError, match=r"can't be read \(there is no task 'TMaze11'\)"):
        ResultsFile(path, MemoryResult, "recurl bench memory")


def test_a_result_that_cannot_be_written_is_in_the_message(tmp_path):
    file = ResultsFile(tmp_path / "memory.csv", MemoryResult, "recurl bench memory")
    file.path.mkdir()  # as good as a full disk
    with pytest.raises(StorageError, match="To keep the result, add this row to the file:\nRepeatPrevious4,gru,"):
        file.add(result(RUNS[0], 0.5))


def test_an_interval_over_tasks_covers_other_tasks():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        means = rng.normal(size=12)
        low, high = hierarchical_interval([mean + rng.normal(size=3) for mean in means])
        covered += low <= 0 <= high
    assert covered > 175
