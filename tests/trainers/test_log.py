import io
import time

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recurl.errors import ArgumentError
from recurl.trainers.live import LiveDisplay
from recurl.trainers.log import Events, LineDisplay, MetricsFile, make_display

LIVE = "loss {loss:.2f}"


def row(step):
    numbers = dict.fromkeys(("return_mean_20", "length_mean_20", "steps_per_s", "loss"), 1.5)
    return {"env_steps": step, **numbers}


def test_metrics_are_cut_to_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.csv"
    metrics = MetricsFile(path)
    for step in range(4):
        metrics.write({"step": step, "x": step / 3})
    metrics.close()
    whole = path.read_text()
    metrics = MetricsFile(path, keep_rows=2)
    for step in (2, 3):
        metrics.write({"step": step, "x": step / 3})
    metrics.close()
    assert path.read_text() == whole
    assert metrics.rows == 4


def test_metrics_shorter_than_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.csv"
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"must hold the 3 rows of the checkpoint, got 0"):
            MetricsFile(path, keep_rows=3)
        path.write_text("step\n")


def test_events_after_a_purge_are_hidden(tmp_path):
    for purge, steps in ((None, (1, 2, 3)), (2, (2,))):
        time.sleep(1.0 if purge else 0.0)  # files are read in the order of the second in their name
        events = Events(tmp_path, purge_step=purge)
        for step in steps:
            events.write({"env_steps": step, "x": 10.0 * step})
        events.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("x")] == [(1, 10.0), (2, 20.0)]


def test_lines_come_with_the_first_and_the_last_row():
    out = io.StringIO()
    display = make_display(Console(file=out), total_steps=3000, live=LIVE)
    assert isinstance(display, LineDisplay)
    for step in (1000, 2000, 3000):
        display.update(row(step))
    display.close()
    first, last = out.getvalue().splitlines()
    assert first.strip().startswith("1,000/3,000 steps")
    assert "loss 1.50  left 1333 s" in first
    assert "3,000/3,000" in last


def test_live_display_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    display = make_display(console, total_steps=3000, live=LIVE, done_steps=1000)
    assert isinstance(display, LiveDisplay)
    display.update(row(2000))
    display.close()
    for part in ("2,000/3,000 steps", "return 1.5", "length 2", "steps/s", "loss 1.50"):
        assert part in out.getvalue()
