"""Base class of samplers, and uniform samplers of single steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recurl.core.errors import UsageError
from recurl.core.keys import NestedKey
from recurl.data.replay_buffers.draws import uniform
from recurl.data.replay_buffers.trajectories import TrajectoryIndex, below
from recurl.data.replay_buffers.trajectory_keys import TrajectoryKeys

__all__ = ["Draw", "RandomSampler", "Sampler", "SamplerWithoutReplacement"]


@dataclass(frozen=True)
class Draw:
    """N steps drawn by a sampler.

    Attributes:
        positions: positions of the steps, int64 ``[N]``.
        starts: bool ``[N]``, True at the first steps of slices; or None.
        ends: bool ``[N]``, True at the last steps of slices; or None.
        mask: bool ``[N]``, False at padding; or None.
        weights: importance weights, float64 ``[N]``; or None.
        last: whether the draw ends an epoch.
    """

    positions: Tensor
    starts: Tensor | None = None
    ends: Tensor | None = None
    mask: Tensor | None = None
    weights: Tensor | None = None
    last: bool = False

    def info(self, starts: Tensor | None = None, write_step: Tensor | None = None) -> dict[str, Tensor]:
        """Return the entries of the draw, ``[N]`` each, with ``starts`` instead of its own, and ``write_step``."""
        starts = self.starts if starts is None else starts
        weights = None if self.weights is None else self.weights.float()
        info = {"index": self.positions, "write_step": write_step, "starts": starts}
        info |= {"ends": self.ends, "mask": self.mask, "priority_weight": weights}
        return {name: values for name, values in info.items() if values is not None}


class Sampler:
    """Base class of samplers, which select the stored steps of a batch.

    A sampler belongs to one buffer, which calls it under a lock.

    Args:
        keys: entries that identify trajectories; the default ones when None.
        truncated_key: entry that the buffer sets at the ends of slices; None for no entry.
    """

    def __init__(self, keys: TrajectoryKeys | None = None, truncated_key: NestedKey | None = None) -> None:
        self.keys = TrajectoryKeys() if keys is None else keys
        self.truncated_key = truncated_key

    def draw(self, index: TrajectoryIndex, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw a batch of steps.

        Args:
            index: index of the stored steps, not empty.
            batch_size: number of steps.
            generator: CPU generator; torch's default generator when None.
        """
        raise NotImplementedError

    def appended(self, index: TrajectoryIndex, positions: Tensor) -> None:
        """Update the sampler's state for new steps at ``positions``, int64 ``[lanes, n]`` (and those overwritten)."""

    def start_epoch(self) -> None:
        """Begin a new epoch, in samplers that draw without replacement."""

    def update_priority(self, index: TrajectoryIndex, positions: Tensor, priority: Tensor) -> None:
        """Set the priorities ``[N]`` of the steps at ``positions``.

        Raises:
            UsageError: the sampler has no priorities.
        """
        raise UsageError(
            f"{type(self).__name__} has no priorities: use PrioritizedSampler or PrioritizedSliceSampler, or don't "
            "update them."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain Python values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""


class RandomSampler(Sampler):
    """Draws single steps uniformly, with replacement.

    In recurrent mode each step of such a sample is a sequence of length 1 from its stored state: the buffer sets
    ``"is_init"`` wherever a step doesn't directly continue the previous one.

    Example:
        >>> from recurl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=4)
        >>> _ = buffer.extend(torch.arange(8))
        >>> buffer.sample().shape
        torch.Size([4])
    """

    def draw(self, index: TrajectoryIndex, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw a batch of steps."""
        return Draw(index.nth_position(below(len(index), uniform(batch_size, index, generator))))


class SamplerWithoutReplacement(Sampler):
    """Draws single steps in random order, each once per epoch. Iterating over the buffer yields one epoch.

    Extending the buffer starts a new epoch.

    Args:
        drop_last: drop the last batch of an epoch if it is incomplete.
        shuffle: draw in random order; if False, in the order of storage, lane by lane.

    Raises:
        UsageError: (when sampling with ``drop_last``) there are fewer steps than one batch needs.

    Example:
        >>> from recurl.data import LazyTensorStorage, ReplayBuffer
        >>> sampler = SamplerWithoutReplacement(shuffle=False)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=3)
        >>> _ = buffer.extend(torch.arange(8))
        >>> [batch.tolist() for batch in buffer]
        [[0, 1, 2], [3, 4, 5], [6, 7]]
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        super().__init__()
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._order = torch.zeros(0, dtype=torch.int64)

    def draw(self, index: TrajectoryIndex, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw a batch of steps."""
        if len(self._order) == 0 or (self.drop_last and len(self._order) < batch_size):
            self._order = index.all_positions()
            if self.shuffle:
                self._order = self._order[torch.randperm(len(self._order), generator=generator)]
        if self.drop_last and len(self._order) < batch_size:
            raise UsageError(
                f"A batch needs {batch_size} stored steps with drop_last=True, but there are only {len(index)}."
            )
        positions, self._order = self._order[:batch_size], self._order[batch_size:]
        return Draw(positions, last=len(self._order) < (batch_size if self.drop_last else 1))

    def appended(self, index: TrajectoryIndex, positions: Tensor) -> None:
        """Begin a new epoch, as the stored steps have changed."""
        self.start_epoch()

    def start_epoch(self) -> None:
        """Begin a new epoch."""
        self._order = torch.zeros(0, dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain Python values."""
        return {"order": self._order.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""
        self._order = state["order"].clone()
