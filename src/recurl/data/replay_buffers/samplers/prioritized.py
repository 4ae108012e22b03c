"""Prioritized samplers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.keys import NEXT, TRUNCATED, NestedKey
from recurl.data.replay_buffers.draws import Priorities
from recurl.data.replay_buffers.samplers.base import Draw, Sampler
from recurl.data.replay_buffers.samplers.slices import SliceSize, draw_of, no_slice
from recurl.data.replay_buffers.trajectories import TrajectoryIndex
from recurl.data.replay_buffers.trajectory_keys import TrajectoryKeys

__all__ = ["PrioritizedSampler", "PrioritizedSliceSampler"]


class PrioritizedSampler(Sampler):
    """Draws single steps with probability ``P(i) = p_i / sum_k p_k``, ``p = (priority + eps) ** alpha``.

    Source: Schaul et al., "Prioritized experience replay" (2016), equation 1. A sample has ``"priority_weight"``,
    float32 ``[N]``: ``(P(i) / min_k P(k)) ** -beta``, at most 1. A new step gets the largest priority set so far (1 at
    first). Update priorities with ``buffer.update_priority(sample["index"], priority)``.

    Args:
        max_capacity: maximum number of items; at least the ``max_size`` of the storage.
        alpha: exponent of the priorities, not negative; 0 draws uniformly.
        beta: exponent of the importance weights, not negative; 1 fully compensates the bias. May be assigned between
            samples.
        eps: positive constant added to every priority, so that none is zero.

    Raises:
        ArgumentError: an argument is out of range; ``max_capacity`` is smaller than the storage; or priorities are
            negative or not finite.

    Example:
        >>> from recurl.data import LazyTensorStorage, ReplayBuffer
        >>> sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        >>> index = buffer.extend(torch.arange(8))
        >>> buffer.update_priority(index, torch.tensor([0.0] * 7 + [1.0]))
        >>> buffer.sample().tolist()
        [7, 7, 7, 7]
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        if max_capacity < 1 or not (0 <= alpha < math.inf and 0 <= beta < math.inf and 0 < eps < math.inf):
            raise ArgumentError(
                "max_capacity and eps must be positive, alpha and beta not negative, and all finite; got "
                f"max_capacity={max_capacity}, alpha={alpha}, beta={beta}, eps={eps}."
            )
        self.max_capacity = max_capacity
        self._set_priorities(Priorities(alpha, beta, eps))

    def _set_priorities(self, priorities: Priorities) -> None:
        self._priorities = priorities
        priorities.allocate(self.max_capacity, "cpu")

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""
        return self._priorities.alpha

    @property
    def eps(self) -> float:
        """Constant added to every priority."""
        return self._priorities.eps

    @property
    def max_priority(self) -> float:
        """The largest priority set so far."""
        return self._priorities.largest.item()

    @property
    def beta(self) -> float:
        """Exponent of the importance weights."""
        return self._priorities.beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._priorities.beta = value

    def draw(self, index: TrajectoryIndex, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw a batch of steps."""
        positions = self._priorities.find(batch_size, generator)
        return Draw(positions, weights=self._priorities.weights(positions))

    def appended(self, index: TrajectoryIndex, positions: Tensor) -> None:
        """Give new steps the largest priority set so far."""
        if index.lanes * index.capacity > self.max_capacity:
            raise ArgumentError(
                f"The sampler's max_capacity={self.max_capacity} must be at least the storage's max_size, "
                f"which has room for {index.lanes * index.capacity} items."
            )
        self._priorities.append(index, positions)

    def update_priority(self, index: TrajectoryIndex, positions: Tensor, priority: Tensor) -> None:
        """Set the priorities of steps; if a step occurs repeatedly, its largest priority is used."""
        if positions.numel() == 0:
            return
        if not (priority.isfinite().all() and priority.min() >= 0):
            raise ArgumentError(
                f"Priorities must be finite and not negative, got {priority.min()} to {priority.max()}."
            )
        self._priorities.assign(index, positions, priority)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain Python values."""
        return self._priorities.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""
        self._priorities.load_state_dict(state)


class PrioritizedSliceSampler(PrioritizedSampler):
    """Draws slices with probability proportional to the priority of their first step, or of any of their steps.

    Slices and marks are those of :class:`SliceSampler`, priorities and weights those of :class:`PrioritizedSampler`;
    all steps of a slice have the weight of the step that was drawn.
    :func:`~recurl.data.replay_buffers.slice_priorities` computes priorities of slices.

    Args:
        max_capacity: maximum number of items; at least the ``max_size`` of the storage.
        alpha: exponent of the priorities, not negative; 0 draws uniformly.
        beta: exponent of the importance weights, not negative; 1 fully compensates the bias.
        eps: positive constant added to every priority, so that none is zero.
        num_slices: number of slices per batch; exactly one of ``num_slices`` and ``slice_len``.
        slice_len: number of steps per slice.
        traj_key: entry that identifies the trajectory of a step; see :class:`SliceSampler`.
        end_key: entry that is True at the last step of a trajectory; see :class:`SliceSampler`.
        truncated_key: entry that is set at slice ends; None to leave the done flags unchanged.
        strict_length: draw slices of full length only. If False, a trajectory that is too short is drawn as a whole,
            by the priority of its first step.
        by_step: draw a step by its priority, and a slice that contains it at a random offset, shifted to stay within
            its trajectory; a trajectory that is too short is drawn as a whole. Otherwise the first and last steps of a
            trajectory, which few slices of full length contain, are drawn less often than others.

    Raises:
        ArgumentError: an argument is out of range, ``by_step`` is set with ``strict_length``, or ``traj_key`` and
            ``end_key`` are both given.
        ArgumentTypeError: not exactly one of ``num_slices`` and ``slice_len`` is given.
        UsageError: (when sampling) no trajectory is long enough, or the batch size is not a multiple of the slices.
        MissingKeyError: (when extending or sampling) the data has no entry that identifies trajectories.
    """

    def __init__(  # noqa: PLR0913 - the customary signature, plus one argument
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        traj_key: NestedKey | None = None,
        end_key: NestedKey | None = None,
        truncated_key: NestedKey | None = (NEXT, TRUNCATED),
        strict_length: bool = True,
        by_step: bool = False,
    ) -> None:
        super().__init__(max_capacity, alpha, beta, eps)
        if by_step and strict_length:
            raise ArgumentError("by_step=True needs strict_length=False: every step can be drawn.")
        self.keys = TrajectoryKeys(traj_key, end_key)
        self.truncated_key = truncated_key
        self.size = SliceSize(num_slices, slice_len)
        self.strict_length = strict_length
        self.by_step = by_step
        self._set_priorities(Priorities(alpha, beta, eps, slices=not by_step, strict=strict_length))

    def draw(self, index: TrajectoryIndex, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw a batch of steps."""
        count, length = self.size.divide(batch_size)
        self._priorities.prepare(index, length)
        if self.keys.chosen is None or not self._priorities.tree.total:
            raise no_slice(self.keys, index, length)
        return draw_of(index, self._priorities.draw(index, count, length, generator), length)
