"""Progress of a run as plain lines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from recurl.trainers.report.metrics import Row
from recurl.trainers.report.shown import Shown

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
        self._shown = Shown(live, total_steps)
        self._total = total_steps
        self._seconds = seconds
        self._next = 0.0
        self._pending = False

    def on_update(self, row: Row) -> None:
        """Print the row when it is time, otherwise keep it."""
        self._shown.update(row)
        self._pending = True
        if time.monotonic() >= self._next:
            self._print()
            self._next = time.monotonic() + self._seconds

    def on_evaluation(self, row: Row) -> None:
        """Keep the row, for the lines that follow."""
        self._shown.evaluate(row)
        self._pending = self._shown.row is not None

    def on_end(self, outcome: object) -> None:
        """Print the last row."""
        if self._pending:
            self._print()

    def _print(self) -> None:
        self._pending = False
        taken = 0 if self._shown.row is None else int(self._shown.row["env_steps"])
        self._console.print(
            f"{taken:>9,}/{self._total:,} steps  {self._shown.text}  left {self._shown.left}",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
