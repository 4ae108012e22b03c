"""Returns and lengths of episodes that span batches."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

__all__ = ["Ended", "RunningEpisodes"]

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Ended(NamedTuple):
    """Episodes that ended in a batch, ordered by the step of their end, then by row."""

    steps: _Array
    """Last step of each episode, as an index into the batch: int64 ``[n]``."""
    returns: _Array
    """Return of each episode: float64 ``[n]``."""
    lengths: _Array
    """Length of each episode: int64 ``[n]``."""


class RunningEpisodes:
    """Running return and length of the current episode of every row.

    Args:
        num_envs: number of rows of a batch, B.

    Attributes:
        returns: returns of the running episodes so far, float64 ``[B]``.
        lengths: lengths of the running episodes so far, int64 ``[B]``.

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

    def add(self, rewards: _Array, dones: _Array, present: _Array | None = None) -> Ended:
        """Add a batch and return the episodes that end in it.

        Args:
            rewards: ``[B, T]``.
            dones: bool ``[B, T]``, true at the last step of an episode.
            present: bool ``[B, T]``, false while a row waits for an absent agent, from one ``dones`` to the next; all
                are present when None.
        """
        rows, steps = rewards.shape
        first = np.zeros(
            (rows, steps + 1), dtype=bool
        )  # steps that start an episode, or continue one from the previous batch
        first[:, 0] = True
        first[:, 1:] = dones
        last = np.zeros_like(
            first
        )  # likewise for ends; the extra column closes episodes that continue in the next batch
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
        self.returns, self.lengths = sums[open_], counts[open_] - 1  # without the extra column
        ended = np.flatnonzero(~open_)
        if present is not None:
            ended = ended[present[row[ended], step[ended]]]
        ended = ended[np.lexsort((row[ended], step[ended]))]
        return Ended(step[ended], sums[ended], counts[ended])
