"""What a sampler is, and the two that draw single steps without priorities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recurl.data.replay_buffers.trajectories import Appended, Bools, Ints, TrajectoryIndex, random_below
from recurl.data.replay_buffers.trajectory_keys import TrajectoryKeys
from recurl.errors import UsageError
from recurl.keys import NestedKey

__all__ = ["Draw", "RandomSampler", "Sampler", "SamplerWithoutReplacement"]


@dataclass(frozen=True)
class Draw:
    """Which steps a sampler drew; N steps.

    Attributes:
        positions: int64 ``[N]``, where they are stored.
        starts: bool ``[N]``, first steps of slices, or None.
        ends: bool ``[N]``, last steps of slices, or None.
        mask: bool ``[N]``, false for padding, or None.
        weights: float ``[N]``, importance weights, or None.
        last: whether the draw ends an epoch.
    """

    positions: Ints
    starts: Bools | None = None
    ends: Bools | None = None
    mask: Bools | None = None
    weights: NDArray[np.float64] | None = None
    last: bool = False

    def info(self, starts: Tensor, write_step: Tensor) -> dict[str, Tensor]:
        """Return the draw as tensors ``[N]``, with what else is known of its steps."""
        info = {"index": torch.from_numpy(self.positions), "write_step": write_step, "starts": starts}
        for name, values in (("ends", self.ends), ("mask", self.mask)):
            if values is not None:
                info[name] = torch.from_numpy(values)
        if self.weights is not None:
            info["priority_weight"] = torch.from_numpy(self.weights).float()
        return info


class Sampler:
    """Chooses which stored steps make a batch.

    A sampler belongs to one buffer, which calls it under a lock.

    Attributes:
        keys: how the buffer tells trajectories apart.
        truncated_key: the entry that the buffer raises at the ends of slices, or None.
    """

    def __init__(self, keys: TrajectoryKeys | None = None, truncated_key: NestedKey | None = None) -> None:
        self.keys = TrajectoryKeys() if keys is None else keys
        self.truncated_key = truncated_key

    def draw(self, index: TrajectoryIndex, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw from a buffer that isn't empty."""
        raise NotImplementedError

    def appended(self, index: TrajectoryIndex, change: Appended) -> None:
        """Take notice of new steps (and of the old ones that they overwrote)."""

    def start_epoch(self) -> None:
        """Begin a new pass over the buffer, for samplers that have such."""

    def update_priority(self, index: TrajectoryIndex, positions: Ints, priority: NDArray[np.float64]) -> None:
        """Set priorities ``[N]`` of the steps at ``positions``.

        Raises:
            UsageError: this sampler has none.
        """
        raise UsageError(
            f"{type(self).__name__} has no priorities: use PrioritizedSampler or PrioritizedSliceSampler, or don't "
            "update them."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain Python values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`."""


class RandomSampler(Sampler):
    """Draws single steps uniformly, with replacement.

    In recurrent mode each step of such a sample is a sequence of length one from its stored state: the buffer raises
    ``"is_init"`` wherever a step doesn't directly continue the one before it.

    Example:
        >>> from recurl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=4)
        >>> _ = buffer.extend(torch.arange(8))
        >>> buffer.sample().shape
        torch.Size([4])
    """

    def draw(self, index: TrajectoryIndex, batch_size: int, generator: torch.Generator | None) -> Draw:
        """See :meth:`Sampler.draw`."""
        return Draw(index.nth_position(random_below(len(index), batch_size, generator)))


class SamplerWithoutReplacement(Sampler):
    """Draws single steps in random order, each once per epoch. Iterating over the buffer gives one epoch.

    Extending the buffer begins a new epoch.

    Args:
        drop_last: leave out the last batch of an epoch when it is short.
        shuffle: False takes the steps in the order in which they are stored, lane by lane.

    Raises:
        UsageError: when sampling with ``drop_last`` from fewer steps than a batch.

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
        self._order = np.zeros(0, np.int64)

    def draw(self, index: TrajectoryIndex, batch_size: int, generator: torch.Generator | None) -> Draw:
        """See :meth:`Sampler.draw`."""
        if self._order.size == 0 or (self.drop_last and self._order.size < batch_size):
            self._order = index.all_positions()
            if self.shuffle:
                self._order = self._order[torch.randperm(self._order.size, generator=generator).numpy()]
        if self.drop_last and self._order.size < batch_size:
            raise UsageError(f"A batch of {batch_size} needs as many steps, the buffer has {len(index)}.")
        positions, self._order = np.split(self._order, [batch_size])
        return Draw(positions, last=self._order.size < (batch_size if self.drop_last else 1))

    def appended(self, index: TrajectoryIndex, change: Appended) -> None:
        """See :meth:`Sampler.appended`."""
        self.start_epoch()

    def start_epoch(self) -> None:
        """See :meth:`Sampler.start_epoch`."""
        self._order = np.zeros(0, np.int64)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Sampler.state_dict`."""
        return {"order": torch.from_numpy(self._order.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`Sampler.load_state_dict`."""
        self._order = state["order"].numpy().copy()
