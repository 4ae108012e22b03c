import csv
import signal

import pytest

from recurl.cli import main
from recurl.trainers.study.popgym.score import MaxMeanReturn

SMALL = (  # noqa: SIM905 - reads as it is typed
    "bench popgym --device cpu --budget 256 --set num_envs=4 rollout_steps=16 sequence_length=16 epochs=1 "
    "minibatches=2 hidden_size=8 encoder_width=8 head_width=8"
).split()


def rows(folder):
    with (folder / "popgym.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_goes_on_adds_cells_and_shows_the_table(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert main([*SMALL, "--cells", "gru", "--tasks", "MineSweeperEasy", "BattleshipEasy", *out]) == 0
    assert "steps/s all runs take" in capsys.readouterr().out
    assert main([*SMALL, "--cells", "gru", "none", "--tasks", "MineSweeperEasy", "BattleshipEasy", *out]) == 0
    said = capsys.readouterr().out
    assert "4 runs, 2 of them finished before" in said
    assert "mean of 2 common tasks" in said
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
    assert "Go on with the same command" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(arguments) == 0
    assert len(rows(tmp_path)) == 3


def test_a_run_that_is_not_finite_does_not_end_the_others(tmp_path, capsys):
    arguments = [*SMALL, "learning_rate=1e30", "--cells", "none", "--tasks", "MineSweeper", "--out", str(tmp_path)]
    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert "3 runs failed: MineSweeperEasy none seed 0, " in said
    assert not (tmp_path / "popgym.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--cells gruu", "There is no cell 'gruu'. Did you mean 'gru'?"),
        ("--tasks RepeatPrevios", "there is no task 'RepeatPrevios'. Did you mean RepeatPrevious?"),
        ("--set epoch=3", "ppo has no option 'epoch'. Did you mean epochs?"),
        ("--set cell=gru", "--set can't set cell, which the benchmark sets itself"),
        ("--set epochs=0.5", "--epochs must be a whole number"),
        ("--budget 100", "must cover one batch of 32768 steps"),
        ("--setting papers", "Did you mean paper?"),
        ("--cells", "--cells needs at least one cell"),
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
