"""Progress of a run as plain lines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from recurl.trainers.report.metrics import LIVE, Row

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS_BETWEEN_LINES = 5.0


class LineDisplay:
    """A plain line every few seconds, for files and pipes; the first and the last row are always shown.

    Args:
        console: console to write to.
        total_steps: environment steps of the whole run.
        live: format of the algorithm's own numbers.
        seconds: seconds between lines.
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

    def write(self, row: Row) -> None:
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
