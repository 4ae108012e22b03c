"""The score of a run on POPGym: the largest mean return of a window of training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from recurl.keys import DONE, NEXT, REWARD
from recurl.trainers.run.running import RunningEpisodes

WINDOW = 65_536
"""Environment steps of a window."""
FEWEST = 100
"""Episodes of a window's mean at least: earlier ones are added to fewer."""


class MaxMeanReturn:
    """The MMER of a run: a callback that takes the mean return of the episodes of every window, and keeps the largest.

    Windows are those of 65,536 environment steps one after the other, whatever the layout of the batches. Returns are
    those of the training, whose policy draws its actions. A window counts when 100 episodes have ended; in a window in
    which fewer end, the last 100 count. Windows that aren't complete at the end of the run are left out.

    Source: the score of Morad et al., "POPGym: Benchmarking Partially Observable Reinforcement Learning" (2023), whose
    epochs have 65,536 steps, and whose library takes the last 100 episodes where fewer end.

    Args:
        num_envs: rows of a batch.

    Attributes:
        episodes: how many have ended.
        last: mean return of the latest window, NaN before there is one.
    """

    def __init__(self, num_envs: int) -> None:
        self.episodes = 0
        self.last = math.nan
        self._largest = math.nan
        self._running = RunningEpisodes(num_envs)
        self._steps = 0
        self._window: list[Any] = []  # returns of the episodes of the window that goes on
        self._latest = np.zeros(0)  # returns of the last episodes

    @property
    def value(self) -> float:
        """The largest mean; that of all episodes, if no window counts; NaN, if none has ended."""
        if math.isnan(self._largest) and len(self._latest):
            return float(self._latest.mean())
        return self._largest

    def on_batch(self, batch: TensorDictBase) -> None:
        """Add a batch ``[B, T]``."""
        rewards, dones = (batch[NEXT, key][..., 0].cpu().numpy() for key in (REWARD, DONE))
        ended = self._running.add(rewards, dones)
        rows, steps = dones.shape
        after = self._steps + (ended.steps + 1) * rows  # environment steps at each one's end
        first, self._steps = self._steps // WINDOW, self._steps + rows * steps
        complete = self._steps // WINDOW
        for window in range(first, complete + 1):
            self._add(ended.returns[(after - 1) // WINDOW == window])
            if window < complete:
                self._close()

    def _add(self, returns: Any) -> None:
        self.episodes += len(returns)
        self._window.append(returns)
        self._latest = np.concatenate((self._latest, returns))[-FEWEST:]

    def _close(self) -> None:
        returns, self._window = np.concatenate(self._window), []
        if self.episodes >= FEWEST:
            self.last = float((returns if len(returns) >= FEWEST else self._latest).mean())
            self._largest = self.last if math.isnan(self._largest) else max(self._largest, self.last)
