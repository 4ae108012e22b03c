"""Terminal progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recurl.trainers.report.lines import LineDisplay

if TYPE_CHECKING:
    from rich.console import Console


def make_display(console: Console, *, total_steps: int, live: str, done_steps: int = 0) -> object:
    """Return a callback that shows progress: a live display on a terminal, plain lines otherwise."""
    if console.is_terminal:
        # Lazy import: importing rich draws from Python's global random number generator.
        from recurl.trainers.report.live import LiveDisplay  # noqa: PLC0415 - see above

        return LiveDisplay(console, total_steps=total_steps, live=live, done_steps=done_steps)
    return LineDisplay(console, total_steps=total_steps, live=live)
