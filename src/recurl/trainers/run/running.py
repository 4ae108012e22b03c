"""Returns and lengths of episodes that span batches."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

__all__ = ["Ended", "RunningEpisodes"]

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Ended(NamedTuple):
    """Episodes that have ended in a batch, in the order of their ends; at the same step, in that of the rows."""

    steps: _Array
    """Step of the batch, from 0, that was each one's last: int64 ``[n]``."""
    returns: _Array
    """float64 ``[n]``."""
    lengths: _Array
    """int64 ``[n]``."""


class RunningEpisodes:
    """Sums the rewards of every row's running episode.

    Args:
        num_envs: rows of a batch, B.

    Attributes:
        returns: of the running episodes so far, float64 ``[B]``.
        lengths: of the running episodes so far, int64 ``[B]``.

    Example:
        >>> running = RunningEpisodes(1)
        >>> running.add(np.ones((1, 3)), np.array([[False, True, False]])).returns
        array([2.])
        >>> running.returns
        array([1.])
    """

    def __init__(self, num_envs: int) -> None:
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, dtype=np.int64)

    def add(self, rewards: _Array, dones: _Array) -> Ended:
        """Add a batch, and return the episodes that end in it.

        Args:
            rewards: ``[B, T]``.
            dones: bool ``[B, T]``, true at the last step of an episode.
        """
        rows, steps = rewards.shape
        first = np.zeros((rows, steps + 1), dtype=bool)  # steps that begin an episode, or go on with one
        first[:, 0] = True
        first[:, 1:] = dones
        last = np.zeros_like(first)  # likewise; the column beyond the end sums to the next batch's beginning
        last[:, :-1] = dones
        last[:, -1] = True
        padded = np.zeros((rows, steps + 1))
        padded[:, :-1] = rewards
        begins, ends = np.flatnonzero(first), np.flatnonzero(last)
        sums = np.add.reduceat(padded.ravel(), begins)
        counts = ends - begins + 1
        row, step = np.divmod(ends, steps + 1)
        carried = begins % (steps + 1) == 0
        sums[carried] += self.returns
        counts[carried] += self.lengths
        open_ = step == steps
        self.returns, self.lengths = sums[open_], counts[open_] - 1  # without the column beyond
        ended = np.flatnonzero(~open_)
        ended = ended[np.lexsort((row[ended], step[ended]))]
        return Ended(step[ended], sums[ended], counts[ended])
