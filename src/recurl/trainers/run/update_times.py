"""Time breakdown of an update."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from recurl.core.precision import torch_matmul_precision
from recurl.core.spans import PARTS, Spans
from recurl.execution.gpu_time import gpu_seconds
from recurl.trainers.algorithms.learner import Learner
from recurl.trainers.algorithms.table import make_algorithm
from recurl.trainers.config import RunConfig
from recurl.trainers.run.callbacks import Callbacks
from recurl.trainers.run.episodes import EpisodeStats
from recurl.trainers.run.faults import FaultWatch
from recurl.trainers.run.outcome import Clock
from recurl.trainers.run.updates import Updates

__all__ = ["UpdateTimes", "time_run", "time_updates"]

_PROFILED = 2


class UpdateTimes(NamedTuple):
    """Times of an update, averaged over several."""

    parts: dict[str, float]
    """Seconds per part, in the order of an update; they add up to ``wall``."""
    wall: float
    """Wall-clock seconds of the update."""
    frames: int
    """Environment steps of the update."""
    gpu_busy: float | None
    """Seconds in which the GPU was busy; None on the CPU."""

    @property
    def gpu_idle(self) -> float | None:
        """Fraction of the update in which the GPU was idle; None on the CPU."""
        return None if self.gpu_busy is None else max(1 - self.gpu_busy / self.wall, 0.0)


def time_run(config: RunConfig, warm_up: int, updates: int) -> UpdateTimes:
    """Measure updates of a run with these options, without a folder; see :func:`time_updates`.

    ``total_steps`` is raised to cover the updates, so that schedules don't end early.
    """
    steps = (warm_up + updates + _PROFILED) * config.frames_per_batch + getattr(config, "learning_starts", 0)
    config = replace(config, total_steps=max(config.total_steps, steps))
    with torch_matmul_precision(config.torch_precision), closing(make_algorithm(config)) as learner:
        return time_updates(learner, warm_up, updates)


def time_updates(learner: Learner[Any, Any], warm_up: int, updates: int) -> UpdateTimes:
    """Measure updates as a trainer makes them, without writing files.

    On a GPU, two more updates are run under the profiler to measure how long kernels run.

    Args:
        learner: the learner.
        warm_up: updates before the measurement, after those that only fill a replay buffer.
        updates: number of updates to measure.

    Raises:
        NonFiniteError: if a number isn't finite.
    """
    device = torch.device(learner.config.device)
    stats = EpisodeStats(learner.config.num_envs)
    clock, made = Clock(), Updates(learner, stats, FaultWatch(learner, stats, skip=False), Callbacks())

    def update() -> None:
        made.make(clock, 1)

    while learner.env_steps < getattr(learner.config, "learning_starts", 0):
        update()
    for _ in range(warm_up):
        update()
    _finish(device)
    start = time.perf_counter()
    with Spans(device) as spans:
        for _ in range(updates):
            update()
    _finish(device)
    wall = (time.perf_counter() - start) / updates
    found = spans.seconds()
    busy = None
    if device.type == "cuda":
        busy = gpu_seconds(lambda: [update() for _ in range(_PROFILED)]) / _PROFILED
    made.finish()
    parts = {name: found[name] / updates for name in PARTS if name in found}
    return UpdateTimes(parts, wall, learner.config.frames_per_batch, busy)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
