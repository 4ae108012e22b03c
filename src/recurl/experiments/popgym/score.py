"""POPGym score of a run: the maximum mean return over windows of training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from recurl.core.keys import DONE, NEXT, REWARD
from recurl.trainers.run.running import RunningEpisodes

WINDOW = 65_536
"""Environment steps of a window."""
MIN_EPISODES = 100
"""Minimum number of episodes in a window's mean; earlier episodes are included if fewer end in the window."""


class MaxMeanReturn:
    """Callback that computes the MMER of a run, the maximum over windows of the mean episodic return.

    Windows are consecutive blocks of 65,536 environment steps, independent of the layout of the batches. Returns are
    those of training episodes with sampled actions. Windows count once 100 episodes have ended in total; if fewer end
    within a window, its mean is over the last 100 episodes. An incomplete window at the end of the run is ignored.

    Source: the score of Morad et al., "POPGym: Benchmarking Partially Observable Reinforcement Learning" (2023), whose
    epochs have 65,536 steps, and whose library averages the last 100 episodes if fewer end.

    Args:
        num_envs: number of rows of a batch.

    Attributes:
        episodes: number of finished episodes.
        last: mean return of the latest window; NaN before the first one.
    """

    def __init__(self, num_envs: int) -> None:
        self.episodes = 0
        self.last = math.nan
        self._largest = math.nan
        self._sum, self._count = 0.0, 0  # of the windows that count
        self._running = RunningEpisodes(num_envs)
        self._steps = 0
        self._window: list[Any] = []  # returns of episodes in the current window
        self._latest = np.zeros(0)  # returns of the last episodes

    @property
    def value(self) -> float:
        """The maximum mean return; the mean of the last episodes if no window counts, NaN if no episode has ended."""
        if math.isnan(self._largest) and len(self._latest):
            return float(self._latest.mean())
        return self._largest

    @property
    def mean(self) -> float:
        """The mean over the windows; like :attr:`value`, the mean of the last episodes if no window counts."""
        return self._sum / self._count if self._count else self.value

    def on_batch(self, batch: TensorDictBase) -> None:
        """Process a batch ``[B, T]``."""
        rewards, dones = (batch[NEXT, key][..., 0].cpu().numpy() for key in (REWARD, DONE))
        ended = self._running.add(rewards, dones)
        rows, steps = dones.shape
        after = self._steps + (ended.steps + 1) * rows  # environment steps at the end of each episode
        first, self._steps = self._steps // WINDOW, self._steps + rows * steps
        complete = self._steps // WINDOW
        for window in range(first, complete + 1):
            self._add(ended.returns[(after - 1) // WINDOW == window])
            if window < complete:
                self._close()

    def _add(self, returns: Any) -> None:
        self.episodes += len(returns)
        self._window.append(returns)
        self._latest = np.concatenate((self._latest, returns))[-MIN_EPISODES:]

    def _close(self) -> None:
        returns, self._window = np.concatenate(self._window), []
        if self.episodes >= MIN_EPISODES:
            self.last = float((returns if len(returns) >= MIN_EPISODES else self._latest).mean())
            self._sum, self._count = self._sum + self.last, self._count + 1
            self._largest = self.last if math.isnan(self._largest) else max(self._largest, self.last)
