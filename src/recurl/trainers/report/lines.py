"""Plain-text progress of a run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from recurl.trainers.report.metrics import Row
from recurl.trainers.report.shown import ProgressText

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS_BETWEEN_LINES = 5.0


class LineDisplay:
    """Callback that prints a plain line every few seconds, for files and pipes. First and last row are always printed.

    Args:
        console: console to write to.
        total_steps: environment steps of the whole run.
        live: format string of the algorithm's metrics.
        seconds: seconds between lines.
    """

    def __init__(
        self, console: Console, *, total_steps: int, live: str, seconds: float = _SECONDS_BETWEEN_LINES
    ) -> None:
        self._console = console
        self._latest = ProgressText(live, total_steps)
        self._total = total_steps
        self._seconds = seconds
        self._next = 0.0
        self._pending = False

    def on_update(self, row: Row) -> None:
        """Print the row if enough time has passed, otherwise keep it."""
        self._latest.update(row)
        self._pending = True
        if time.monotonic() >= self._next:
            self._print()
            self._next = time.monotonic() + self._seconds

    def on_evaluation(self, row: Row) -> None:
        """Keep the row for subsequent lines."""
        self._latest.evaluate(row)
        self._pending = self._latest.row is not None

    def on_end(self, outcome: object) -> None:
        """Print the last row if it is still pending."""
        if self._pending:
            self._print()

    def _print(self) -> None:
        self._pending = False
        steps = 0 if self._latest.row is None else int(self._latest.row["env_steps"])
        self._console.print(
            f"{steps:>9,}/{self._total:,} steps  {self._latest.text}  left {self._latest.left}",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
