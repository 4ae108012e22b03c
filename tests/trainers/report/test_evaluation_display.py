import io

from rich.console import Console

from recurl.trainers.report.evaluation_display import EvaluationDisplay


def test_lines_come_every_few_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    display = EvaluationDisplay(Console(file=out), 1000)
    for second in range(13):
        now[0] = 100.0 + second
        display.update(second, 1000 * second)
    display.close()
    assert out.getvalue().splitlines() == [
        "Evaluating: 5 of 1,000 episodes, 5,000 steps",
        "Evaluating: 10 of 1,000 episodes, 10,000 steps",
    ]


def test_a_terminal_shows_it_and_is_left_in_order():
    out = io.StringIO()
    display = EvaluationDisplay(Console(file=out, force_terminal=True, width=100), 10, seconds=0.0)
    for done in range(3):
        display.update(done, 10 * done)
    display.close()
    assert "Evaluating: 2 of 10 episodes, 20 steps" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")


def test_a_short_evaluation_says_nothing():
    for terminal in (False, True):
        out = io.StringIO()
        display = EvaluationDisplay(Console(file=out, force_terminal=terminal), 10)
        display.update(1, 10)
        display.close()
        assert out.getvalue() == ""
    display = EvaluationDisplay(None, 10, seconds=0.0)
    display.update(1, 10)
    display.close()
