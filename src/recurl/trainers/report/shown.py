"""Text of the latest metrics of a run, for the terminal."""

from __future__ import annotations

import math
from string import Formatter
from typing import Any

from recurl.trainers.report.metrics import EVALUATION, RETURN, Row

_EPISODES = "training return {return_mean_20:.4g}  length {length_mean_20:.0f}"
_SPEED = "{steps_per_s:.0f} steps/s"
_COMPILING = 2  # updates, of which the second may compile programs


class _Dashes(Formatter):
    """Formatter that shows NaN, which marks values not available yet, as a dash."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        return "-" if isinstance(value, float) and math.isnan(value) else super().format_field(value, format_spec)


class ProgressText:
    """Progress text of a run: metrics of the last update and the last evaluation.

    Args:
        live: format string of the algorithm's metrics.
        total_steps: environment steps of the whole run.

    Example:
        >>> latest = ProgressText("loss {loss:.2f}", 1000)
        >>> numbers = {"length_mean_20": math.nan, "steps_per_s": 50.0, "wall_s": 2.0, "loss": math.nan}
        >>> latest.update({"env_steps": 100, "return_mean_20": math.nan, **numbers})
        >>> latest.text, latest.left
        ('no episode has ended yet  50 steps/s  loss -', '-')
        >>> for steps, seconds in (200, 30.0), (300, 31.0):
        ...     latest.update({"env_steps": steps, "return_mean_20": math.nan, **numbers, "wall_s": seconds})
        >>> latest.left
        '7 s'
    """

    def __init__(self, live: str, total_steps: int) -> None:
        self._live = live
        self._total = total_steps
        self._begin: Row | None = None
        self._compiling = _COMPILING
        self._evaluated: Row | None = None
        self.row: Row | None = None

    def update(self, row: Row) -> None:
        """Set the row of the last update."""
        if self._compiling:
            self._compiling -= 1
            self._begin = row
        self.row = row

    def evaluate(self, row: Row) -> None:
        """Set the row of the last evaluation."""
        self._evaluated = row

    @property
    def text(self) -> str:
        """The metrics in one line."""
        if self.row is None:
            return "collecting"
        episodes = "no episode has ended yet" if math.isnan(self.row[RETURN]) else _EPISODES
        parts = [_Dashes().format(part, **self.row) for part in (episodes, _SPEED, self._live) if part]
        if self._evaluated is not None:
            parts.insert(1, f"evaluation return {self._evaluated[EVALUATION]:.4g}")
        return "  ".join(parts)

    @property
    def left(self) -> str:
        """Remaining time at the mean speed of this process since it has compiled its programs."""
        if self.row is None or self._begin is None:
            return "-"
        steps, seconds = (self.row[name] - self._begin[name] for name in ("env_steps", "wall_s"))
        remaining = max(self._total - self.row["env_steps"], 0)
        return duration(remaining * seconds / steps) if steps and seconds > 0 else "-"


def duration(seconds: float) -> str:
    """Format a duration for display.

    Example:
        >>> duration(45.2), duration(150.0), duration(12_000.0)
        ('45 s', '2 min 30 s', '3 h 20 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
