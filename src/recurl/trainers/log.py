"""The numbers of a run on the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from recurl.trainers.metrics import Row

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS_BETWEEN_LINES = 5.0
LIVE = "return {return_mean_20:.4g}  length {length_mean_20:.0f}  {steps_per_s:.0f} steps/s"


class Display(Protocol):
    """Shows a run while it goes on."""

    def update(self, row: Row) -> None:
        """Show the latest row."""
        ...

    def close(self) -> None:
        """Leave the terminal in order."""
        ...


class LineDisplay:
    """A plain line every few seconds, for files and pipes; the first and the last row are always shown.

    Args:
        console: where to write.
        total_steps: environment steps of the whole run.
        live: format of the algorithm's own numbers.
        seconds: time between lines.
    """

    def __init__(
        self, console: Console, *, total_steps: int, live: str, seconds: float = _SECONDS_BETWEEN_LINES
    ) -> None:
        self._console = console
        self._format = f"{LIVE}  {live}"
        self._total = total_steps
        self._seconds = seconds
        self._next = 0.0
        self._pending: Row | None = None

    def update(self, row: Row) -> None:
        """Print the row when it is time, otherwise keep it."""
        self._pending = row
        if time.monotonic() >= self._next:
            self._print()
            self._next = time.monotonic() + self._seconds

    def close(self) -> None:
        """Print the last row."""
        self._print()

    def _print(self) -> None:
        if self._pending is None:
            return
        row, self._pending = self._pending, None
        left = max(self._total - row["env_steps"], 0) / max(row["steps_per_s"], 1e-9)
        self._console.print(
            f"{int(row['env_steps']):>9,}/{self._total:,} steps  {self._format.format(**row)}  left {left:.0f} s",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )


def make_display(console: Console, *, total_steps: int, live: str, done_steps: int = 0) -> Display:
    """Return a live display on a terminal, plain lines otherwise."""
    if console.is_terminal:
        # Imported where it is used: rich draws from Python's global random numbers when it is imported.
        from recurl.trainers.live import LiveDisplay  # noqa: PLC0415 - as said above

        return LiveDisplay(console, total_steps=total_steps, live=live, done_steps=done_steps)
    return LineDisplay(console, total_steps=total_steps, live=live)
