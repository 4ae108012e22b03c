"""Prioritized samplers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recurl.core.errors import ArgumentError
from recurl.core.keys import NEXT, TRUNCATED, NestedKey
from recurl.data.replay_buffers.samplers.base import Draw, Sampler
from recurl.data.replay_buffers.samplers.slices import SliceSize, no_slice, slices, slices_around
from recurl.data.replay_buffers.sum_tree import PriorityTree
from recurl.data.replay_buffers.trajectories import Appended, Ints, TrajectoryIndex
from recurl.data.replay_buffers.trajectory_keys import TrajectoryKeys

__all__ = ["PrioritizedSampler", "PrioritizedSliceSampler"]

Floats = NDArray[np.float64]


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
        self.alpha = alpha
        self.beta = beta
        self.eps = eps
        self.max_priority = 1.0
        self._tree = PriorityTree(max_capacity)

    def draw(self, index: TrajectoryIndex, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw a batch of steps."""
        positions = self._find(batch_size, generator)
        return Draw(positions, weights=self._weights(positions))

    def _find(self, count: int, generator: torch.Generator | None) -> Ints:
        return self._tree.find(torch.rand(count, dtype=torch.float64, generator=generator).numpy() * self._tree.total)

    def _weights(self, positions: Ints) -> Floats:
        return (self._tree[positions] / self._tree.minimum) ** -self.beta

    def appended(self, index: TrajectoryIndex, change: Appended) -> None:
        """Give new steps the largest priority set so far."""
        self._check_capacity(index)
        positions = change.positions.ravel()
        self._tree.set(positions, np.full(positions.size, self._new_priority()))

    def _check_capacity(self, index: TrajectoryIndex) -> None:
        if index.lanes * index.capacity > self.max_capacity:
            raise ArgumentError(
                f"The sampler's max_capacity={self.max_capacity} must be at least the storage's max_size, "
                f"which has room for {index.lanes * index.capacity} items."
            )

    def _new_priority(self) -> float:
        return float((self.max_priority + self.eps) ** self.alpha)

    def update_priority(self, index: TrajectoryIndex, positions: Ints, priority: Floats) -> None:
        """Set the priorities of steps; if a step occurs repeatedly, its largest priority is used."""
        if positions.size == 0:
            return
        if not (np.isfinite(priority).all() and priority.min() >= 0):
            raise ArgumentError(
                f"Priorities must be finite and not negative, got {priority.min()} to {priority.max()}."
            )
        self.max_priority = max(self.max_priority, float(priority.max()))
        order = np.argsort(priority, kind="stable")
        self._assign(index, positions[order], (priority[order] + self.eps) ** self.alpha)

    def _assign(self, index: TrajectoryIndex, positions: Ints, values: Floats) -> None:
        self._tree.set(positions, values)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain Python values."""
        leaves = self._tree[np.arange(self.max_capacity)]
        return {"max_priority": self.max_priority, "tree": torch.from_numpy(leaves)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""
        highest = state["max_priority"]
        if type(highest) is not float or not 0 <= highest < np.inf:
            raise ArgumentError(
                f"The saved max_priority must be a finite number that isn't negative, got {highest!r:.80}."
            )
        self.max_priority = highest
        self._tree.set(np.arange(self.max_capacity), state["tree"].numpy())


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
        # Priorities of all steps; the tree has only those of the steps that can currently be drawn.
        self._priority = np.zeros(max_capacity)
        self._length = slice_len

    def draw(self, index: TrajectoryIndex, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw a batch of steps."""
        count, length = self.size.divide(batch_size)
        if length != self._length:
            self._length = length
            self._place(index, index.all_positions())
        if self.keys.chosen is None or self._tree.total == 0:
            raise no_slice(self.keys, index, length)
        found = self._find(count, generator)
        if self.by_step:
            lanes, first, lengths = slices_around(index, found, length, generator)
        else:
            lanes, _, stop = index.bounds(index.run_at(found))
            first = index.steps(found)
            lengths = np.minimum(length, stop - first)
        drawn = slices(index, lanes, first, lengths)
        return Draw(drawn.positions, drawn.starts, drawn.ends, weights=np.repeat(self._weights(found), lengths))

    def appended(self, index: TrajectoryIndex, change: Appended) -> None:
        """Give new steps the largest priority set so far."""
        self._check_capacity(index)
        lanes, count = change.positions.shape
        self._priority[change.positions] = self._new_priority()
        reach = min(count + (self._length or 1) - 1, index.filled)
        steps = np.arange(index.written - reach, index.written)
        self._place(index, index.positions(np.arange(lanes)[:, None], steps).ravel())
        if not self.strict_length:
            lane, first, _ = index.bounds(change.shrunk)
            self._place(index, index.positions(lane, first))

    def _place(self, index: TrajectoryIndex, positions: Ints) -> None:
        """Update the tree at ``positions`` if the slice length is known."""
        if self._length is None:
            return
        if self.by_step:
            self._tree.set(positions, self._priority[positions])
            return
        steps = index.steps(positions)
        _, first, stop = index.bounds(index.run_at(positions))
        can_start = steps + self._length <= stop
        if not self.strict_length:
            can_start |= steps == first
        self._tree.set(positions, np.where(can_start, self._priority[positions], 0.0))

    def _assign(self, index: TrajectoryIndex, positions: Ints, values: Floats) -> None:
        self._priority[positions] = values
        self._place(index, positions)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain Python values."""
        own = {"priorities": torch.from_numpy(self._priority.copy()), "length": self._length}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""
        length = state["length"]
        if length is not None and (type(length) is not int or length < 1):
            raise ArgumentError(f"The saved length of slices must be a positive integer or None, got {length!r:.80}.")
        super().load_state_dict(state)
        self._priority[:] = state["priorities"].numpy()
        self._length = length
