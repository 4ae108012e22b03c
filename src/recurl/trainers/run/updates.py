"""Updates of a run: collect, check, learn, report."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from recurl.core.spans import COLLECTION, LEARNING, STATISTICS, span
from recurl.distributed import Watch
from recurl.trainers.algorithms.learner import Learner
from recurl.trainers.report.metrics import RETURN, SPREAD, Row
from recurl.trainers.run.callbacks import Callbacks
from recurl.trainers.run.episodes import EpisodeStats
from recurl.trainers.run.faults import FaultWatch
from recurl.trainers.run.motion import MOTION
from recurl.trainers.run.outcome import Clock

__all__ = ["COLUMNS", "Updates"]

COLUMNS = (
    "update",
    "env_steps",
    "episodes",
    "wall_s",
    "cpu_s",
    "steps_per_s",
    RETURN,
    SPREAD,
    "length_mean_20",
    "skipped",
)
_AHEAD_ON = ("cuda",)  # devices that run asynchronously


class Updates:
    """Makes updates and reports each as a row of metrics.

    On a GPU, updates are asynchronous if the learner supports it and faults are not skipped. An update is launched
    before its batch is checked and its episodes are counted, which happens while the GPU learns. Its metrics are read,
    checked and reported after the next update has been launched, or by :meth:`finish`; those of the first one at once,
    as the second waits for what is compiled. A batch or an update that isn't finite changes no weights and ends the
    run; a non-finite update does so at the next one. The rows and their order don't change.

    Args:
        learner: the learner.
        stats: episode statistics.
        watch: checks of batches and updates.
        callbacks: callbacks that receive batches (``on_batch``) and rows (``on_update``).
    """

    def __init__(
        self, learner: Learner[Any, Any], stats: EpisodeStats, watch: FaultWatch, callbacks: Callbacks
    ) -> None:
        self._learner, self._stats, self._watch, self._callbacks = learner, stats, watch, callbacks
        device, skips = torch.device(learner.config.device), learner.config.on_nonfinite == "skip"
        self._asynchronous = learner.learns_ahead and device.type in _AHEAD_ON and not skips
        self._launched: Callable[[], None] | None = None

    def make(self, clock: Clock, number: int) -> None:
        """Make an update.

        Args:
            clock: the clock of the run.
            number: number of the update, starting at 1.

        Raises:
            NonFiniteError: if the batch, or the previous update, isn't finite.
        """
        learner = self._learner
        steps, wall = learner.env_steps, clock.wall_s
        with span(COLLECTION):
            batch = learner.collect()
        Watch.progress()
        self._callbacks.call("on_batch", batch)
        with span(STATISTICS):
            check = self._watch.begin(batch)
            admitted = self._asynchronous or check()
        with span(LEARNING):
            learned = learner.learn_later(batch) if admitted else None
        Watch.progress()
        if not self._asynchronous:
            self._report(number, learned, partial(self._row, clock, number, steps, wall))
            return
        self.finish()
        with span(STATISTICS):
            check()
        row = self._row(clock, number, steps, wall)
        self._launched = partial(self._report, number, learned, lambda: row)
        if not steps:
            self.finish()

    def finish(self) -> None:
        """Wait for the pending update, if any, and report it.

        Raises:
            NonFiniteError: if the update isn't finite.
        """
        launched, self._launched = self._launched, None
        if launched is not None:
            launched()

    def _report(self, number: int, learned: Callable[[], dict[str, float]] | None, row: Callable[[], Row]) -> None:
        numbers = dict.fromkeys(self._learner.reported, math.nan)
        if learned is not None:
            with span(LEARNING):
                numbers = learned()
            self._watch.learned(number)
        self._callbacks.call("on_update", {**row(), "skipped": self._watch.skipped, **numbers})

    def _row(self, clock: Clock, number: int, steps: int, wall: float) -> Row:
        """Return the row of an update that started after ``steps`` environment steps, at time ``wall``."""
        learner, stats, now = self._learner, self._stats, clock.wall_s
        numbers = (
            number,
            learner.env_steps,
            stats.episodes,
            round(now, 3),
            round(clock.cpu_s, 3),
            round((learner.env_steps - steps) / (now - wall), 1),
            stats.mean_return,
            stats.std_return,
            stats.mean_length,
            self._watch.skipped,
        )
        motion = dict(zip(MOTION, stats.motion, strict=True)) if learner.real_actions else {}
        return {**dict(zip(COLUMNS, numbers, strict=True)), **motion, **learner.scheduled, **learner.collection}
