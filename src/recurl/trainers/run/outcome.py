"""Outcome of a run: its end, and its duration."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Outcome:
    """End of a run."""

    status: Literal["solved", "finished", "stopped", "failed"]
    """The return asked for was reached; all steps were taken; the run was asked to stop; an error ended it, which is
    seen by callbacks only."""
    env_steps: int
    """Environment steps taken, earlier processes included."""
    wall_s: float
    """Seconds of training, earlier processes included, set-up not."""
    cpu_s: float
    """Seconds of CPU time this process (and its predecessors) spent on training, set-up not."""
    return_mean: float
    """Mean return of the last 20 episodes."""


class Clock:
    """Stopwatch of a run.

    Args:
        wall_s: seconds of earlier processes.
        cpu_s: seconds of CPU time of earlier processes.
    """

    def __init__(self, wall_s: float = 0.0, cpu_s: float = 0.0) -> None:
        self._wall_start = time.perf_counter() - wall_s
        self._cpu_start = time.process_time() - cpu_s

    @property
    def wall_s(self) -> float:
        """Seconds of training, earlier processes included."""
        return time.perf_counter() - self._wall_start

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU time, earlier processes included."""
        return time.process_time() - self._cpu_start
