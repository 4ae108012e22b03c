"""Comparison of run folders: groups, scores, intervals, and runs that can't be compared."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from recurl.cli import main
from recurl.core.errors import ArgumentError
from recurl.trainers import DQNConfig, PPOConfig, RunFolder
from recurl.trainers.study.comparison import compare
from recurl.trainers.study.curves import find_runs
from recurl.trainers.study.statistics import (
    aggregates,
    bootstrap_interval,
    interquartile_mean,
    stratified_intervals,
)

pytestmark = pytest.mark.usefixtures("no_curves")


def make(path, returns, kind=PPOConfig, evaluations=(), **options):
    """Write a run folder with the given returns, one per 1,000 steps."""
    folder = RunFolder(path)
    config = kind(**{"env": "recurl/TMaze-v0", **options})
    path.mkdir(parents=True)
    folder.config.write_text(json.dumps(config.to_dict()))
    for file, column, values in (
        (folder.metrics, "return_mean_20", returns),
        (folder.evaluations, "eval_return", evaluations),
    ):
        rows = [f"{n},{1000 * n},{value}" for n, value in enumerate(values, 1)]
        if rows:
            file.write_text("\n".join([f"update,env_steps,{column}", *rows, ""]))
    return path


def test_the_interquartile_mean_is_that_of_the_middle_half():
    assert interquartile_mean(np.array([5.0])) == 5.0
    assert interquartile_mean(np.array([1.0, 2.0, 6.0])) == 3.0
    assert interquartile_mean(np.array([9.0, 0.0, 1.0, 2.0])) == 1.5  # 0 and 9 discarded
    assert interquartile_mean(np.arange(10.0)[::-1]) == np.arange(2.0, 8.0).mean()
    assert interquartile_mean(np.array([[1.0, 3.0], [5.0, 7.0]])).tolist() == [2.0, 6.0]


@pytest.mark.slow
def test_the_interval_covers_the_truth():
    """The intervals cover the mean in about 95% of 200 samples of size 20 from a normal distribution."""
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        low, high = bootstrap_interval(random.normal(size=20))
        covered += low <= 0.0 <= high
    assert 175 <= covered <= 199


@pytest.mark.slow
def test_groups_scores_and_files(tmp_path):
    for seed in range(3):
        make(tmp_path / f"lstm{seed}", [0.0, 0.5, 0.9 + seed / 100], seed=seed, cell="lstm")
        make(tmp_path / f"none{seed}", ["nan", 0.1, 0.2], seed=seed, cell="none", device="cpu", threads=1 + seed)
    comparison = compare(sorted(tmp_path.iterdir()))
    (found,) = comparison.tasks
    assert (comparison.aggregates, comparison.notes) == ([], [])
    assert (found.metric, found.references) == ("training", {"optimum": 1.0, "best without memory": 0.5})
    assert [(one.label, sorted(one.scores)) for one in found.groups] == [
        ("cell=lstm", [0.9, 0.91, 0.92]),
        ("cell=none", [0.2, 0.2, 0.2]),
    ]
    lstm, none = found.groups
    assert lstm.iqm == pytest.approx(0.91)
    assert 0.9 <= lstm.interval[0] <= 0.91 <= lstm.interval[1] <= 0.92
    assert (lstm.steps[0], none.steps[0], none.steps[-1]) == (1000, 2000, 3000)
    assert none.curve[[0, -1]] == pytest.approx([0.1, 0.2])
    title, header, *rows = comparison.table().splitlines()
    assert title == "recurl/TMaze-v0: training return, mean of the last 20 episodes; optimum 1; best without memory 0.5"
    assert header.split() == ["runs", "steps", "IQM", "95%", "interval", "min", "max"]
    assert rows[1].split() == ["cell=none", "3", "3,000", "0.2", "0.2", "to", "0.2", "0.2", "0.2"]
    written = comparison.write(tmp_path / "out.svg")
    assert [path.name for path in written] == ["out.svg", "out.csv", "out_scores.csv"]
    for label in ("cell=lstm (3)", "cell=none (3)", "optimum"):
        assert f"<!-- {label} -->" in written[0].read_text()
    with written[1].open() as file:
        points = list(csv.DictReader(file))
    assert {"group": "cell=none", "env_steps": "3000", "iqm": "0.2", "low": "0.2", "high": "0.2"} in points
    assert len(written[2].read_text().splitlines()) == 7


def test_one_short_run_is_enough(tmp_path):
    found = compare([make(tmp_path / "run", [0.5])])
    assert found.tasks[0].groups[0].interval is None
    assert found.table().splitlines()[-1].split() == ["ppo,", "lstm", "1", "1,000", "0.5", "-", "0.5", "0.5"]
    found.write(tmp_path / "one.png")


def test_a_run_that_ended_earlier_counts_with_its_last_return(tmp_path):
    make(tmp_path / "a", [0.0, 1.0], seed=0)
    make(tmp_path / "b", [0.0, 0.5, 0.5, 0.5], seed=1)
    (found,) = compare([tmp_path / "a", tmp_path / "b"]).tasks[0].groups
    assert found.steps[-1] == 4000
    assert found.curve[-1] == pytest.approx(0.75)


def test_evaluations_come_first_where_all_runs_have_them(tmp_path):
    make(tmp_path / "a", [0.1], evaluations=[0.7, 0.8], eval_every=1000)
    make(tmp_path / "b", [0.2], evaluations=[0.9], eval_every=2000, seed=1)
    both = [tmp_path / "a", tmp_path / "b"]
    found = compare(both)
    (task,) = found.tasks
    assert (found.metric, len(task.groups), task.groups[0].scores) == ("evaluation", 1, [0.8, 0.9])
    assert "recurl/TMaze-v0: evaluation return, last evaluation" in found.table()
    assert compare(both, "training").tasks[0].groups[0].scores == [0.1, 0.2]
    make(tmp_path / "c", [0.3], seed=2)
    assert compare([*both, tmp_path / "c"]).metric == "training"


def test_labels_of_several_algorithms(tmp_path):
    make(tmp_path / "a", [0.1], cell="lstm")
    make(tmp_path / "b", [0.1], cell="gru")
    make(tmp_path / "c", [0.1], DQNConfig)
    (found,) = compare([tmp_path / name for name in "abc"]).tasks
    assert [one.label for one in found.groups] == ["ppo, cell=lstm", "ppo, cell=gru", "dqn, lstm"]


def test_groups_are_in_the_order_of_their_numbers(tmp_path):
    for place, (size, cell) in enumerate([(128, "gru"), (16, "lstm"), (8, "lstm"), (16, "gru"), (8, "gru")]):
        make(tmp_path / str(place), [0.1], hidden_size=size, cell=cell)
    (found,) = compare(sorted(tmp_path.iterdir())).tasks
    assert [one.label for one in found.groups] == [
        "cell=gru, hidden_size=8",
        "cell=gru, hidden_size=16",
        "cell=gru, hidden_size=128",
        "cell=lstm, hidden_size=8",
        "cell=lstm, hidden_size=16",
    ]


def test_a_run_whose_last_policy_was_not_evaluated_is_named(tmp_path):
    early = make(tmp_path / "a", [0.1, 0.2, 0.3], evaluations=[0.7, 0.8], eval_every=1000)
    make(tmp_path / "b", [0.1, 0.2], evaluations=[0.7, 0.8], eval_every=1000, seed=1)
    found = compare([tmp_path / "a", tmp_path / "b"])
    assert found.notes == [f"{early}: last evaluated after 2,000 of 3,000 steps"]
    assert found.table().splitlines()[-1] == found.notes[0]


def several_tasks(folder):
    """Runs of two tasks with references and one without, and a cell without a run on one task."""
    for seed in range(4):
        for cell, score in (("lstm", 0.9), ("gru", 0.7)):
            for task in ("recurl/TMaze-v0", "recurl/RepeatPrevious-v0", "CartPole-v1"):
                if (cell, task) != ("gru", "CartPole-v1"):
                    name = f"{cell}-{task.replace('/', '-')}-{seed}"
                    steps = 10 if task == "CartPole-v1" else 20
                    make(folder / name, [0.0, score + seed / 100], env=task, seed=seed, cell=cell, rollout_steps=steps)
    make(folder / "none", [0.0, 0.5], env="recurl/TMaze-v0", cell="none", rollout_steps=20)


@pytest.mark.slow
def test_several_tasks_are_aggregated_as_rliable_does(tmp_path, capsys, monkeypatch):
    several_tasks(tmp_path / "runs")
    found = compare(sorted((tmp_path / "runs").iterdir()))
    assert [task.task for task in found.tasks] == ["recurl/RepeatPrevious-v0", "recurl/TMaze-v0", "CartPole-v1"]
    assert [one.label for one in found.aggregates] == ["cell=gru", "cell=lstm"]
    assert found.notes == [
        "CartPole-v1 declares no reference returns: it is excluded from aggregates over tasks",
        "cell=none has no run on recurl/RepeatPrevious-v0: it is excluded from aggregates over tasks",
    ]
    lstm = found.aggregates[1]
    raw = np.array([0.9, 0.91, 0.92, 0.93])
    repeat, maze = (raw - 0.25) / 0.75, (raw - 0.5) / 0.5
    both = np.sort(np.concatenate([repeat, maze]))
    wanted = [both[2:6].mean(), np.median([repeat.mean(), maze.mean()]), both.mean(), 1 - both.mean()]
    assert lstm.runs == 8
    assert lstm.values == pytest.approx(wanted)
    low, high = lstm.intervals
    assert ((low < lstm.values) & (lstm.values < high)).all()
    again = compare(sorted((tmp_path / "runs").iterdir()))
    assert again.table() == found.table()
    lines = found.table().splitlines()[:-3]
    assert lines[-4].startswith("Over tasks: normalized training return (0 best without memory, 1 optimum), 95%")
    assert lines[-3].split() == ["runs", "IQM", "median", "mean", "optimality", "gap"]
    assert lines[-1].split()[:3] == ["cell=lstm", "8", f"{wanted[0]:.3f}"]
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *map(str, sorted((tmp_path / "runs").iterdir())), "--out", "all.svg"]) == 0
    names = "all.svg, all.csv, all_scores.csv, all_aggregates.svg, all_aggregates.csv"
    assert f"Written: {names}" in capsys.readouterr().out
    with open("all_aggregates.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["group"] == "cell=lstm"]
    assert [row["aggregate"] for row in rows] == ["IQM", "median", "mean", "optimality gap"]
    assert [float(row["value"]) for row in rows] == pytest.approx(wanted, rel=1e-5)
    with open("all.csv") as file:
        assert {row["task"] for row in csv.DictReader(file)} == {task.task for task in found.tasks}
    for title in ("recurl/TMaze-v0", "CartPole-v1"):
        assert f"<!-- {title} -->" in Path("all.svg").read_text()
    assert "<!-- optimality gap -->" in Path("all_aggregates.svg").read_text()


@pytest.mark.slow
def test_stratified_intervals_cover_the_truth():
    """The intervals cover in about 95% of 200 samples of 10 runs on each of three tasks with different means."""
    random = np.random.default_rng(1)
    covered = np.zeros(4)
    for _ in range(200):
        low, high = stratified_intervals([random.normal(mean, 0.1, size=10) for mean in (0.1, 0.3, 0.5)])
        covered += (low <= [0.3, 0.3, 0.3, 0.7]) & (high >= [0.3, 0.3, 0.3, 0.7])
    assert (covered[1:] >= 175).all()
    assert (covered <= 200).all()


def test_aggregates_of_unequal_numbers_of_runs():
    scores = [np.array([0.0, 1.0, 2.0]), np.array([0.5])]
    iqm, median, mean, gap = aggregates(scores)
    assert (iqm, median, mean, gap) == pytest.approx((0.75, 0.75, 0.75, (1 / 3 + 0.5) / 2))


def test_runs_that_cannot_be_compared(tmp_path):
    one = make(tmp_path / "one", [0.1])
    bare = make(tmp_path / "bare", ["nan"])
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    for paths, metric, message in (
        ([one, bare], None, r"The run .*bare has no finished episode: leave it out, or train it for longer"),
        ([one], "evaluation", r"The run .*one has no evaluation \(--eval-every\)"),
        ([tmp_path], None, r"is neither a run nor a sweep: name folders written by recurl train or sweep"),
        ([tmp_path / "none"], None, r"none is neither a run nor a sweep"),
        ([tmp_path / "sweep"], None, r"The sweep .*sweep contains no run yet"),
    ):
        with pytest.raises(ArgumentError, match=message):
            compare(paths, metric)
    with pytest.raises(ArgumentError, match=r"A picture's name must end with .png, .svg, .pdf, got .*out.txt"):
        compare([one]).write(tmp_path / "out.txt")


def test_the_command_line(tmp_path, capsys, monkeypatch):
    run = make(tmp_path / "run", [0.5])
    assert [folder.path for folder in find_runs([run])] == [run]
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "run"]) == 0
    assert "Written: comparison.png, comparison.csv, comparison_scores.csv" in capsys.readouterr().out
    for words, message in (
        ([], "recurl compare takes folders of runs or sweeps, got none"),
        (["run", "--out", "no/where.png"], "There is no folder no: create it"),
        (["run", "--metric", "evalution"], "invalid choice 'evalution'"),
    ):
        assert main(["compare", *words]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert len(said.splitlines()) == 1
