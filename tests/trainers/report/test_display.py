import io
import math

import pytest
from rich.console import Console

from recurl.trainers.report.display import make_display
from recurl.trainers.report.lines import LineDisplay
from recurl.trainers.report.live import LiveDisplay

LIVE = "loss {loss:.2f}"


def row(step, **more):
    numbers = dict.fromkeys(("return_mean_20", "length_mean_20", "steps_per_s", "loss"), 1.5)
    return {"env_steps": step, **numbers, "wall_s": step / 100, **more}


def display(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    return make_display(console, total_steps=3000, live=LIVE, done_steps=0), out


def test_lines_come_with_the_first_and_the_last_row():
    shown, out = display(terminal=False)
    assert isinstance(shown, LineDisplay)
    for step in (1000, 2000, 3000):
        shown.on_update(row(step, wall_s=step / 100))
    shown.on_end(None)
    first, last = out.getvalue().splitlines()
    assert first.strip().startswith("1,000/3,000 steps")
    assert "loss 1.50  left -" in first
    assert "3,000/3,000" in last
    assert last.endswith("left 0 s")


def test_live_display_on_a_terminal():
    shown, out = display(terminal=True)
    assert isinstance(shown, LiveDisplay)
    shown.on_update(row(500, wall_s=0.0))
    shown.on_update(row(1000, wall_s=30.0))
    shown.on_update(row(2000, wall_s=697.0))
    shown.on_end(None)
    for part in ("2,000/3,000 steps, left 11 min 7 s", "training return 1.5", "length 2", "steps/s", "loss 1.50"):
        assert part in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_no_nan_before_the_first_episode(terminal):
    shown, out = display(terminal)
    shown.on_update(row(1000, return_mean_20=math.nan, length_mean_20=math.nan, loss=math.nan))
    shown.on_end(None)
    assert "no episode has ended yet  2 steps/s  loss -" in out.getvalue()
    assert "nan" not in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_the_last_evaluation_is_shown(terminal):
    shown, out = display(terminal)
    shown.on_update(row(1000))
    shown.on_evaluation({"env_steps": 1000, "eval_return": 0.875})
    shown.on_end(None)
    assert "training return 1.5  length 2  evaluation return 0.875  2 steps/s" in out.getvalue()


def test_the_time_left_is_that_of_the_mean_speed():
    shown, out = display(terminal=False)
    shown.on_update(row(100, wall_s=0.0))
    shown.on_update(row(1000, wall_s=90.0))  # the second update may compile programs
    shown.on_update(row(2000, wall_s=100.0, steps_per_s=1e6))  # evaluation time is included
    shown.on_end(None)
    assert out.getvalue().splitlines()[-1].endswith("left 10 s")
