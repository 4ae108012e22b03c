"""Progress of a run on the terminal: a bar where it can be drawn, lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recurl.trainers.report.lines import LineDisplay

if TYPE_CHECKING:
    from rich.console import Console


def make_display(console: Console, *, total_steps: int, live: str, done_steps: int = 0) -> object:
    """Return a live display on a terminal, plain lines otherwise: a callback."""
    if console.is_terminal:
        # Imported where it is used: rich draws from Python's global random numbers when it is imported.
        from recurl.trainers.report.live import LiveDisplay  # noqa: PLC0415 - as said above

        return LiveDisplay(console, total_steps=total_steps, live=live, done_steps=done_steps)
    return LineDisplay(console, total_steps=total_steps, live=live)
