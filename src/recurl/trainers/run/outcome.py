"""Outcome of a run: status and duration."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run."""

    status: Literal["solved", "finished", "stopped", "failed"]
    """solved: the target return was reached; finished: all steps were taken; stopped: a stop was requested; failed: an
    error ended the run (seen by callbacks only)."""
    env_steps: int
    """Environment steps taken, including those before the run was resumed."""
    wall_s: float
    """Wall-clock seconds of training, without setup, including those before the run was resumed."""
    cpu_s: float
    """Seconds of CPU time spent on training, without setup, including those before the run was resumed."""
    return_mean: float
    """Mean return of the last 20 episodes."""


class Clock:
    """Stopwatch of a run.

    Args:
        wall_s: wall-clock seconds before the run was resumed.
        cpu_s: seconds of CPU time before the run was resumed.
    """

    def __init__(self, wall_s: float = 0.0, cpu_s: float = 0.0) -> None:
        self._wall_start = time.perf_counter() - wall_s
        self._cpu_start = time.process_time() - cpu_s

    @property
    def wall_s(self) -> float:
        """Wall-clock seconds of training, including those before the run was resumed."""
        return time.perf_counter() - self._wall_start

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU time, including those before the run was resumed."""
        return time.process_time() - self._cpu_start
