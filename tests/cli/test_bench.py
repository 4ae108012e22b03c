import csv
from itertools import pairwise

import pytest
import torch

from recurl.cli import main
from recurl.diagnostics import RNNCase, RNNTime
from recurl.experiments.bench_figure import figure

SMALL = ["bench", "rnn", "--device", "cpu", "--hidden-size", "8", "--batch", "2", "--repeats", "2", "--threads", "1"]


def test_bench_rnn_shows_and_writes(tmp_path, capsys):
    threads = torch.get_num_threads()
    more = ["--cell", "lstm", "gru", "--time", "5", "9", "--mean-segment", "0", "--backends", "loop", "pad", "triton"]
    assert main([*SMALL, *more, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert torch.get_num_threads() == threads
    assert said.count("the fastest") == 4
    assert said.count("triton can't run: it needs an NVIDIA GPU") == 4
    assert "gru 8>8, 2 x 9, no resets" in said
    with (tmp_path / "out" / "rnn.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    for row in rows:
        assert (row["median_ms"] == "") == (row["reason"] != "") == (row["backend"] == "triton")
    assert [row["time"] for row in rows[:6]] == ["5"] * 3 + ["9"] * 3
    assert (tmp_path / "out" / "rnn.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_that_can_run(tmp_path, capsys):
    assert main([*SMALL, "--backends", "triton", "--out", str(tmp_path)]) == 0
    assert "the fastest" not in capsys.readouterr().out
    assert (tmp_path / "rnn.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bench", "There is no benchmark '': use recurl bench rnn"),
        ("bench learning", "There is no benchmark 'learning'"),
        ("bench rnn --cell rnn", "--cell"),
        ("bench rnn --hidden-size 0", "--hidden-size must be positive, got 0"),
        ("bench rnn --mean-segment -1", "--mean-segment must not be negative, got -1"),
        ("bench rnn --threads 0", "--threads must be positive, got 0"),
        ("bench rnn --repeats 0", "--repeats must be positive, got 0"),
        ("bench rnn --backends fast", "--backends must be of auto, fastest, "),
        ("bench rnn --device abacus", "--device abacus can't be used"),
        ("bench rnn --device meta", "--device meta can't be used"),
        ("bench rnn --hidden-size 1000000000", "GiB for the weights"),
        ("bench rnn --time 2000000000 --batch 1000", "GiB for the batch"),
        ("bench rnn --seconds nan", "--seconds must be a finite number, got nan"),
        ("bench rnn --batch", "need a value each"),
        ("bench rnn --out {tmp}/none/x", "Can't write to {tmp}/none/x (No such file or directory)"),
        ("bench rnn --time 2 --batch 1 --repeats 1 --backends loop --out {tmp}/file/x", "--out"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, words):
    (tmp_path / "file").write_text("")
    assert main(arguments.format(tmp=tmp_path).split()) == 2
    out, said = capsys.readouterr()
    assert len(said.splitlines()) == 1
    assert words.format(tmp=tmp_path) in said
    assert out == "", "nothing was timed"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
@pytest.mark.parametrize("spread", [1.0, 1.1, 1.5, 2.0, 4.0, 8.0, 30.0, 100.0, 999.0, 1e4, 1e6])
@pytest.mark.parametrize("start", [0.0123, 0.9, 7.5, 812.0])
def test_labels_of_the_plot_do_not_overlap(start, spread):
    case = RNNCase()
    times = {"loop": start, "pad": start * spread**0.5, "cpu": start * spread}
    drawn = figure([case], [RNNTime(case, name, (time,)) for name, time in times.items()])
    drawn.draw_without_rendering()
    axis = drawn.axes[0].xaxis
    low, high = axis.get_view_interval()
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = [tick.label1.get_window_extent() for tick in ticks if tick.label1.get_text()]
    assert 2 <= len(boxes) <= 12
    assert all(left.x1 + 2 < right.x0 for left, right in pairwise(boxes))
    assert not any(label.get_text() for label in axis.get_minorticklabels())
