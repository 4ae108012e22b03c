"""Files of a run folder with arbitrary content: they are read within bounds, or refused in one line."""

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from recurl.cli.main import main
from recurl.core.errors import ArgumentError
from recurl.core.untrusted import read_json
from recurl.trainers import PPOConfig, RunFolder, make_env
from recurl.trainers.export.formats import FORMATS
from recurl.trainers.keyword_arguments import keyword_arguments
from recurl.trainers.report import metrics
from recurl.trainers.report.metrics import MetricsFile, read_curve, read_metrics
from recurl.trainers.report.plots import plot_learning_curve, smoothed
from recurl.trainers.report.references import reference_returns
from recurl.trainers.study.comparison import compare
from recurl.trainers.study.grid import make_jobs
from recurl.trainers.study.sweep import Sweep
from tests.bounds import within

ENV = "recurl/TMaze-v0"
HEADER = "update,env_steps,return_mean_20\n"


@pytest.fixture(autouse=True)
def _within_seconds():
    with within(seconds=10):
        yield


def make(path, rows="1,1000,0.5\n", **options):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(PPOConfig(env=ENV).to_dict() | options))
    if rows is not None:
        (path / "metrics.csv").write_text(HEADER + rows)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"env": "\xff"}', "is not JSON: .*utf-8"),
        (b"[" * 100_000, "is not JSON: it is nested more than 32 levels deep"),
        (b'{"a":' * 50 + b"1" + b"}" * 50, "is not JSON: it is nested more than 32 levels deep"),
        (b'{"env": 1, "env": 2}', "is not JSON: an object has the key 'env' twice"),
        (b'{"env": "recurl/TMaze-v0", "gamma": NaN}', "is not JSON: NaN is not a valid value of an option"),
        (b'{"env": "recurl/TMaze-v0", "gamma": Infinity}', "--gamma must be a finite number"),
        (b'{"env": "recurl/TMaze-v0", "seed": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b'{"env": "recurl/TMaze-v0", "seed": ' + b"9" * 400 + b"}", "--seed must be at most 9,223,"),
        (
            b'{"env": "recurl/TMaze-v0", "learning_rate": ' + b"9" * 400 + b"}",
            "--learning-rate must be a finite number",
        ),
        (b'{"env": "recurl/TMaze-v0", "cell": "' + b"x" * 2**21 + b'"}', "can't be read: it has more than 1,048,576 b"),
        (b'{"env": "recurl/TMaze-v0", "cell": ["lstm"]}', "--cell must be text in UTF-8"),
        (b'{"env": "recurl/TMaze-v0", "env_kwargs": "k=1"}', "--env-kwargs must be a tuple"),
        (b'{"env": "recurl/TMaze-v0", "env_kwargs": ["k"]}', "--env-kwargs takes name=value"),
        (
            b'{"env": "recurl/TMaze-v0", "algorithm": 3}',
            "algorithm must be a name such as 'ppo', got 3|no algorithm '3'",
        ),
        (b'{"env": "recurl/TMaze-v0", "' + b"y" * 10**5 + b'": 3}', r"Unknown options \['yy.*\.\.\."),
        (b"3", "must contain a JSON object, got int"),
        (b"", "is not JSON"),
        (None, "can't be read: it is not a regular file"),
        ("link", "can't be read: it is a symbolic link"),
    ],
)
def test_options_that_are_none(tmp_path, capsys, text, message):
    folder = make(tmp_path / "run")
    path = folder / "config.json"
    path.unlink()
    if text is None:
        os.mkfifo(path)
    elif text == "link":
        (tmp_path / "other.json").write_text(json.dumps(PPOConfig(env=ENV).to_dict()))
        path.symlink_to(tmp_path / "other.json")
    else:
        path.write_bytes(text)
    for read in (lambda: compare([folder]), lambda: RunFolder(folder).read_config()):
        with pytest.raises(ArgumentError, match=message) as caught:
            read()
        assert len(str(caught.value)) < 700
    assert main(["compare", str(folder), "--out", str(tmp_path / "out.png")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


DEEP = {
    "operators": "-" * 5000 + "1",
    "more operators": "~" * 200_000 + "1",
    "sums": "1+" * 5000 + "1",
    "brackets": "(" * 5000 + "1" + ")" * 5000,
    "lists": "[" * 300 + "]" * 300,
    "digits": "9" * 5000,
}


@pytest.mark.parametrize("value", DEEP.values(), ids=DEEP)
def test_names_that_are_nested_deeply(tmp_path, value):
    for options, message in (
        ({"cell": f"s5(state_size={value})"}, "The options of a cell must be numbers|don't fit|must be"),
        ({"wrapper": (f"recurl.envs.gym_wrappers:SelectEntries(start={value})",)}, "--wrapper"),
    ):
        folder = make(tmp_path / "run", **options)
        with pytest.raises(ArgumentError, match=message) as caught:
            make_env(RunFolder(folder).read_config(), 1)
        assert len(str(caught.value)) < 700
        compare([folder])
    assert keyword_arguments("--env-kwargs", [f"k={value}"])


@pytest.mark.parametrize(("option", "count"), [("env_workers", 2), ("collectors", "ray:2")])
def test_many_environments_are_refused_at_once(option, count):
    for envs, divisors in ((2**31 - 1, "1, 2147483647"), (9, "1, 3, 9"), (111_546_435, "1, 3, 5, 7, 11, 13, 15")):
        with (
            within(seconds=3),
            pytest.raises(ArgumentError, match=f"must divide --num-envs, got 2 and {envs}: use {divisors}") as caught,
        ):
            PPOConfig(env=ENV, num_envs=envs, total_steps=10**15, **{option: count})
        assert len(str(caught.value)) < 250


def test_the_divisors_that_are_named_are_the_nearest():
    with pytest.raises(ArgumentError, match=r"use 20, 24, 30, 36, 40, 45, 48, 60, 72, 80, 90, 120\."):
        PPOConfig(env=ENV, num_envs=720, env_workers=70)


def test_compare_reads_options_that_no_run_could_have(tmp_path):
    """The plot shows the values in the file and executes nothing."""
    folder = make(tmp_path / "run", num_envs=2**31 - 1, env_workers=2, cell=r"a$\frac{b", algorithm="x:y")
    found = compare([folder])
    assert found.table().splitlines()[-1].startswith(r"y, a$\frac{b")
    assert found.write(tmp_path / "out.png")[0].stat().st_size > 1000


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_texts_are_drawn_literally(tmp_path, kind):
    plots = make(tmp_path / "run")
    title = r"$\frac{ $x$ \n" + "x" * 10_000
    plot_learning_curve(plots / "metrics.csv", tmp_path / f"out.{kind}", title=title, references={"$\\a{": 1.0})
    assert (tmp_path / f"out.{kind}").stat().st_size < 200_000


@pytest.mark.parametrize(
    "rows",
    [
        f"1,{'9' * 400},0.5\n",
        f"1,1{'0' * 16},0.5\n",
        f"{'9' * 5000},1000,0.5\n",
        "1,1000,1e999\n",
        "1,1000,nan\n",
        "1,1000\n",
        "",
    ],
)
def test_rows_with_numbers_that_no_run_has_are_left_out(tmp_path, rows):
    folder = make(tmp_path / "run", rows + "2,2000,0.25\n")
    assert compare([folder]).tasks[0].groups[0].scores == [0.25]


def test_returns_beyond_all_bounds_are_refused(tmp_path):
    folder = make(tmp_path / "run", "1,1000,1e308\n2,2000,1e308\n")
    with pytest.raises(ArgumentError, match=r"has returns beyond 1e\+100, whose means can't be computed: leave it out"):
        compare([folder])
    plot_learning_curve(folder / "metrics.csv", tmp_path / "out.png", title="", references={})


@pytest.mark.parametrize("name", ["metrics.csv", "evaluations.csv"])
@pytest.mark.parametrize("make_it", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_metrics_that_are_no_file(tmp_path, name, make_it, capsys):
    folder = make(tmp_path / "run", None)
    make_it(folder / name)
    assert main(["compare", str(folder), "--out", str(tmp_path / "out.png"), "--metric", "auto"]) == 2
    assert f"{name} can't be read (it is " in capsys.readouterr().err
    with pytest.raises(ArgumentError, match="can't be read"):
        MetricsFile(folder / name, ["update"], updates=1, notify=pytest.fail)


@pytest.mark.slow
def test_metrics_without_end(tmp_path):
    """A file of zeros, and a line of a gigabyte: neither is read into memory."""
    path = make(tmp_path / "run") / "metrics.csv"
    with path.open("wb") as file:
        file.truncate(2**32)
    with pytest.raises(ArgumentError, match="has more than 2,147,483,648 bytes"):
        read_metrics(path)
    with path.open("wb") as file:
        file.write(HEADER.encode())
        file.truncate(2**28)
    assert read_metrics(path)[1] == []


def test_curves_of_many_rows_take_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "_MAX_POINTS", 64)
    path = make(tmp_path / "run", "".join(f"{n},{n},{n}\n" for n in range(1, 1001))) / "metrics.csv"
    steps, values = read_curve(path)
    assert len(steps) <= 65
    assert steps[[0, -1]].tolist() == values[[0, -1]].tolist() == [1.0, 1000.0]
    assert set(np.diff(steps)[:-1]) == {16.0}


def test_long_curves_are_smoothed_in_linear_time():
    values = np.arange(1_000_000.0)
    assert smoothed(values, 20_000)[-1] == pytest.approx(values[-20_000:].mean())


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"pulls": 10**9}, marks=pytest.mark.slow),
        {"num_arms": 10**12},
        {"pulls": "x"},
        {"nothing": 1},
        {"num_arms": 0},
    ],
)
def test_references_of_any_arguments(arguments):
    assert reference_returns("recurl/Bandit-v0", arguments) == {}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("results.csv", b"job,status\n\xff,finished\n", r"results.csv can't be read \(.*utf-8.*move it away"),
        ("results.csv", None, r"results.csv can't be read \(it is not a regular file\)"),
        ("results.csv", b'"' + b"x" * 200_000, r"results.csv can't be read \(field larger"),
        ("sweep.json", b"[" * 100_000, "sweep.json is not JSON: it is nested more than 32 levels deep"),
        ("sweep.json", b"\xff", "sweep.json is not JSON: .*utf-8"),
        ("sweep.json", None, r"sweep.json can't be read \(it is not a regular file\)"),
    ],
)
def test_sweeps_with_files_that_are_none(tmp_path, name, content, message):
    jobs = make_jobs(PPOConfig, {}, 1, lambda words: PPOConfig(env=ENV))
    with Sweep(tmp_path, jobs, pytest.fail).hold():
        pass
    (tmp_path / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=message), Sweep(tmp_path, jobs, pytest.fail).hold():
        pass


def test_a_sweep_with_a_run_without_metrics(tmp_path, monkeypatch):
    """A run that exits with 0 but leaves no files counts as failed, and doesn't end the sweep."""
    jobs, said = make_jobs(PPOConfig, {}, 1, lambda words: PPOConfig(env=ENV)), []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", ""], **options))
    sweep = Sweep(tmp_path, jobs, pytest.fail)
    with sweep.hold():
        sweep.run(1, report=said.append, should_stop=lambda: False)
    assert said[-1] == f"failed seed=0: it exited with status 0 ({tmp_path / 'seed=0'}.log)"


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_an_exported_program_runs_no_pickle(tmp_path, monkeypatch):
    """``torch.export.load`` unpickles a member of the file that isn't tensors only."""
    monkeypatch.chdir(tmp_path)
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "policy.pt2")
    assert FORMATS["torch"].read(tmp_path / "policy.pt2") is not None
    bomb = io.BytesIO()
    torch.save((Bomb(),), bomb)
    with zipfile.ZipFile("policy.pt2") as whole, zipfile.ZipFile("bomb.pt2", "w") as changed:
        for member in whole.infolist():
            data = bomb.getvalue() if member.filename.endswith(".pt") else whole.read(member)
            changed.writestr(member.filename, data)
    with pytest.raises(ArgumentError, match="this one contains objects that would run code: export the run again"):
        FORMATS["torch"].read(tmp_path / "bomb.pt2")
    assert not Path("ran").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_json_within_bounds_is_read(tmp_path):
    path = tmp_path / "it.json"
    value = {"a": [1, 2.5, "x", None, True, {"b": []}], "inf": float("inf")}
    path.write_text(json.dumps(value))
    assert read_json(path) == value
