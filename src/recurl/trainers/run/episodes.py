"""Statistics of finished training episodes."""

from __future__ import annotations

from collections import deque
from statistics import pstdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.distributed import gather
from recurl.trainers.run.running import RunningEpisodes

WINDOW = 20


class EpisodeStats:
    """Returns and lengths of the last finished episodes of all ranks, which may span batches.

    Args:
        num_envs: number of rows of a batch, B.

    Attributes:
        motion: how much the actions of the last batch change, :data:`~recurl.trainers.run.motion.MOTION`.

    Example:
        >>> stats = EpisodeStats(1)
        >>> done = torch.tensor([[False, True, False]])
        >>> stats.update(torch.ones(1, 3), done)
        >>> stats.episodes, stats.mean_return, stats.mean_length
        (1, 2.0, 2.0)
    """

    def __init__(self, num_envs: int) -> None:
        self._running = RunningEpisodes(num_envs)
        self.episodes = 0
        self.motion: tuple[float, ...] = ()
        self.returns: deque[float] = deque(maxlen=WINDOW)
        self.lengths: deque[int] = deque(maxlen=WINDOW)

    def update(
        self,
        reward: Tensor,
        done: Tensor,
        *,
        begins: Tensor | None = None,
        without: Tensor | None = None,
        present: Tensor | None = None,
    ) -> None:
        """Add a batch.

        Args:
            reward: unscaled rewards ``[B, T]``.
            done: bool ``[B, T]``, true at the last step of an episode.
            begins: bool ``[B]``, rows that start a new episode with this batch; an unfinished earlier one is dropped.
            without: bool ``[B]``, rows whose episodes are dropped; they start new ones after the batch.
            present: bool ``[B, T]``, false while a row waits for an absent agent; all are present when None.
        """
        rewards, dones = reward.cpu().double().numpy(), done.cpu().numpy()
        if begins is not None:
            self._drop(begins.cpu().numpy())
        dropped = np.zeros(len(rewards), dtype=bool) if without is None else without.cpu().numpy()
        taking_part = None if present is None else present.cpu().numpy()
        ended = self._running.add(rewards, dones & ~dropped[:, None], taking_part)
        found = gather((len(ended.steps), *(column[-WINDOW:] for column in ended)))
        self.episodes += sum(count for count, *_ in found)
        steps, returns, lengths = (np.concatenate(column) for column in list(zip(*found, strict=True))[1:])
        latest = np.argsort(steps, kind="stable")[-WINDOW:]  # rows of one step are in order
        self.returns.extend(returns[latest].tolist())
        self.lengths.extend(lengths[latest].tolist())
        self._drop(dropped)

    def _drop(self, rows: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        self._running.returns[rows], self._running.lengths[rows] = 0.0, 0

    @property
    def mean_return(self) -> float:
        """Mean return of the last 20 episodes, or of all if there are fewer; nan if there are none."""
        return sum(self.returns) / len(self.returns) if self.returns else float("nan")

    @property
    def std_return(self) -> float:
        """Standard deviation of the returns of the last 20 episodes."""
        return pstdev(self.returns) if self.returns else float("nan")

    @property
    def mean_length(self) -> float:
        """Mean length of the last 20 episodes in steps."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else float("nan")

    def reached(self, target: float | None) -> bool:
        """Return whether there are 20 episodes with a mean return of at least ``target``."""
        return target is not None and len(self.returns) == WINDOW and self.mean_return >= target

    def clear_running(self) -> None:
        """Discard the running episodes."""
        self._running.returns[:], self._running.lengths[:] = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""
        return {
            "return": torch.from_numpy(self._running.returns.copy()),
            "length": torch.from_numpy(self._running.lengths.copy()),
            "episodes": self.episodes,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state returned by :meth:`state_dict`.

        Raises:
            ArgumentError: if the state is of another number of environments.
        """
        sums, lengths = state["return"].numpy().copy(), state["length"].numpy().copy()
        if not sums.shape == lengths.shape == self._running.returns.shape:
            raise ArgumentError(
                f"The episodes must be those of {len(self._running.returns)} environments, got {sums.shape} and "
                f"{lengths.shape}."
            )
        self._running.returns, self._running.lengths = sums, lengths
        self.episodes = state["episodes"]
        self.returns = deque(state["returns"], maxlen=WINDOW)
        self.lengths = deque(state["lengths"], maxlen=WINDOW)
