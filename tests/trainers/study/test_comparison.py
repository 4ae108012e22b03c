"""Comparison of runs that lie in folders: groups, scores, intervals, and what can't be compared."""

import csv
import json

import numpy as np
import pytest

from recurl.cli import main
from recurl.errors import ArgumentError
from recurl.trainers import DQNConfig, PPOConfig, RunFolder
from recurl.trainers.study.comparison import compare
from recurl.trainers.study.curves import find_runs
from recurl.trainers.study.statistics import bootstrap_interval, interquartile_mean


def make(path, returns, kind=PPOConfig, evaluations=(), **options):
    """Write the folder of a run whose returns are given at every 1,000 steps."""
    folder = RunFolder(path)
    config = kind(env="recurl/TMaze-v0", **options)
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
    assert interquartile_mean(np.array([9.0, 0.0, 1.0, 2.0])) == 1.5  # 0 and 9 left out
    assert interquartile_mean(np.arange(10.0)[::-1]) == np.arange(2.0, 8.0).mean()
    assert interquartile_mean(np.array([[1.0, 3.0], [5.0, 7.0]])).tolist() == [2.0, 6.0]


@pytest.mark.slow
def test_the_interval_covers_the_truth():
    """Of 200 samples of 20 from a normal distribution, about 95 %."""
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        low, high = bootstrap_interval(random.normal(size=20))
        covered += low <= 0.0 <= high
    assert 175 <= covered <= 199


def test_groups_scores_and_files(tmp_path):
    for seed in range(3):
        make(tmp_path / f"lstm{seed}", [0.0, 0.5, 0.9 + seed / 100], seed=seed, cell="lstm")
        make(tmp_path / f"none{seed}", ["nan", 0.1, 0.2], seed=seed, cell="none", device="cpu", threads=1 + seed)
    found = compare(sorted(tmp_path.iterdir()))
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
    title, header, *rows = found.table().splitlines()
    assert title == "recurl/TMaze-v0: return of the last 20 training episodes; optimum 1; best without memory 0.5"
    assert header.split() == ["runs", "steps", "IQM", "95", "%", "interval", "least", "most"]
    assert rows[1].split() == ["cell=none", "3", "3,000", "0.2", "0.2", "to", "0.2", "0.2", "0.2"]
    written = found.write(tmp_path / "out.svg")
    assert [path.name for path in written] == ["out.svg", "out.csv", "out_scores.csv"]
    for label in ("cell=lstm (3)", "cell=none (3)", "optimum"):
        assert f"<!-- {label} -->" in written[0].read_text()
    with written[1].open() as file:
        points = list(csv.DictReader(file))
    assert {"group": "cell=none", "env_steps": "3000", "iqm": "0.2", "low": "0.2", "high": "0.2"} in points
    assert len(written[2].read_text().splitlines()) == 7


def test_one_short_run_is_enough(tmp_path):
    found = compare([make(tmp_path / "run", [0.5])])
    assert found.groups[0].interval is None
    assert found.table().splitlines()[-1].split() == ["ppo,", "lstm", "1", "1,000", "0.5", "-", "0.5", "0.5"]
    found.write(tmp_path / "one.png")


def test_a_run_that_ended_earlier_counts_with_its_last_return(tmp_path):
    make(tmp_path / "a", [0.0, 1.0], seed=0)
    make(tmp_path / "b", [0.0, 0.5, 0.5, 0.5], seed=1)
    (found,) = compare([tmp_path / "a", tmp_path / "b"]).groups
    assert found.steps[-1] == 4000
    assert found.curve[-1] == pytest.approx(0.75)


def test_evaluations_come_first_where_all_runs_have_them(tmp_path):
    make(tmp_path / "a", [0.1], evaluations=[0.7, 0.8], eval_every=1000)
    make(tmp_path / "b", [0.2], evaluations=[0.9], eval_every=2000, seed=1)
    both = [tmp_path / "a", tmp_path / "b"]
    found = compare(both)
    assert (found.metric, len(found.groups), found.groups[0].scores) == ("evaluation", 1, [0.8, 0.9])
    assert "return of the last evaluation" in found.table()
    assert compare(both, "training").groups[0].scores == [0.1, 0.2]
    make(tmp_path / "c", [0.3], seed=2)
    assert compare([*both, tmp_path / "c"]).metric == "training"


def test_labels_of_several_algorithms(tmp_path):
    make(tmp_path / "a", [0.1], cell="lstm")
    make(tmp_path / "b", [0.1], cell="gru")
    make(tmp_path / "c", [0.1], DQNConfig)
    found = compare([tmp_path / name for name in "abc"])
    assert [one.label for one in found.groups] == ["ppo, cell=lstm", "ppo, cell=gru", "dqn, lstm"]


def test_runs_that_cannot_be_compared(tmp_path):
    one = make(tmp_path / "one", [0.1])
    other = make(tmp_path / "other", [0.1], env_kwargs=("corridor_length=5",))
    bare = make(tmp_path / "bare", ["nan"])
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    for paths, metric, message in (
        (
            [one, other],
            None,
            r"Only runs of one task can be compared, got recurl/TMaze-v0 \(.*one\) and .*corridor_length=5",
        ),
        ([one, bare], None, r"The run .*bare has no episode that ended: leave it out, or train it for longer"),
        ([one], "evaluation", r"The run .*one has no evaluation \(--eval-every\)"),
        ([tmp_path], None, r"is neither a run nor a sweep: name folders that recurl train or sweep wrote"),
        ([tmp_path / "none"], None, r"none is neither a run nor a sweep"),
        ([tmp_path / "sweep"], None, r"The sweep .*sweep holds no run yet"),
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
        (["run", "--out", "no/where.png"], "There is no folder no: make it"),
        (["run", "--metric", "evalution"], "invalid choice 'evalution'"),
    ):
        assert main(["compare", *words]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert len(said.splitlines()) == 1
