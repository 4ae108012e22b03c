import io

from rich.console import Console

from recurl.trainers.report.display import make_display
from recurl.trainers.report.lines import LineDisplay
from recurl.trainers.report.live import LiveDisplay

LIVE = "loss {loss:.2f}"


def row(step):
    numbers = dict.fromkeys(("return_mean_20", "length_mean_20", "steps_per_s", "loss"), 1.5)
    return {"env_steps": step, **numbers}


def test_lines_come_with_the_first_and_the_last_row():
    out = io.StringIO()
    display = make_display(Console(file=out), total_steps=3000, live=LIVE)
    assert isinstance(display, LineDisplay)
    for step in (1000, 2000, 3000):
        display.write(row(step))
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
    display.write(row(2000))
    display.close()
    for part in ("2,000/3,000 steps", "return 1.5", "length 2", "steps/s", "loss 1.50"):
        assert part in out.getvalue()
