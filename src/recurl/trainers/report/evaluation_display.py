"""Terminal progress of an evaluation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_PICTURES = 0.2


class EvaluationDisplay:
    """Progress of an evaluation: a status line on a terminal, a printed line every few seconds elsewhere.

    Args:
        console: console to write to; None to show nothing.
        episodes: number of episodes of the evaluation.
        seconds: seconds before the first line and between lines; the default depends on the console.

    Example:
        >>> from rich.console import Console
        >>> display = EvaluationDisplay(Console(), 3, seconds=0.0)
        >>> display.update(1, 2000)
        Evaluating: 1 of 3 episodes, 2,000 steps
    """

    def __init__(self, console: Console | None, episodes: int, *, seconds: float | None = None) -> None:
        self._console = console
        self._episodes = episodes
        self._live: Any = None
        if console is not None and console.is_terminal:
            # Lazy import: importing rich draws from Python's global random number generator.
            from rich.status import Status  # noqa: PLC0415 - see above

            self._live = Status("", console=console)
        usual = _SECONDS_BETWEEN_LINES if self._live is None else _SECONDS_BETWEEN_PICTURES
        self._seconds = usual if seconds is None else seconds
        self._next = time.monotonic() + self._seconds
        self._begun = False

    def update(self, done: int, steps: int) -> None:
        """Show the number of finished episodes and of steps if enough time has passed."""
        if self._console is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._seconds
        text = f"Evaluating: {done:,} of {self._episodes:,} episodes, {steps:,} steps"
        if self._live is None:
            self._console.print(text, soft_wrap=True, markup=False, highlight=False)
            return
        self._live.update(text)
        if not self._begun:
            self._begun = True
            self._live.start()

    def close(self) -> None:
        """Stop drawing."""
        if self._begun:
            self._live.stop()
