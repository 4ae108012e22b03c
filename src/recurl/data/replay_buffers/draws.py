"""Rules by which slices are sampled, with tensor operations, for all buffers and samplers.

Nothing here waits for the device, and no shape depends on data, except where a docstring says so.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.data.replay_buffers.sum_tree import PriorityTree
from recurl.data.replay_buffers.trajectories import TrajectoryIndex, below

__all__ = ["ByPriority", "ByStep", "ByTrajectory", "Drawing", "Priorities", "Slices", "slices_around", "slices_within"]


class Slices(NamedTuple):
    """Sampled slices.

    Attributes:
        lanes: lane of each slice, int64 ``[S]``.
        first: first step number of each slice, int64 ``[S]``.
        lengths: number of steps of each slice, int64 ``[S]``, positive.
        weights: importance weight of each slice, float64 ``[S]``, or None.
    """

    lanes: Tensor
    first: Tensor
    lengths: Tensor
    weights: Tensor | None = None

    def positions(self, index: TrajectoryIndex, length: int) -> Tensor:
        """Return the positions of the steps, ``[S, length]``; shorter slices are padded with their last step."""
        last = self.lengths.unsqueeze(-1) - 1
        offsets = torch.arange(length, device=last.device).minimum(last)
        return index.positions(self.lanes.unsqueeze(-1), self.first.unsqueeze(-1) + offsets)


class Drawing(Protocol):
    """Rule for sampling slices."""

    def draw(self, index: TrajectoryIndex, count: int, length: int, generator: torch.Generator | None = None) -> Slices:
        """Draw ``count`` slices of at most ``length`` steps; shorter runs are taken as a whole."""
        ...


class ByStep:
    """Draws a step uniformly, and a slice around it."""

    def draw(self, index: TrajectoryIndex, count: int, length: int, generator: torch.Generator | None = None) -> Slices:
        """Draw ``count`` slices of at most ``length`` steps."""
        drawn = index.nth_position(below(index.filled * index.lanes, uniform(count, index, generator)))
        return slices_around(index, drawn, length, generator)


class ByTrajectory:
    """Draws a run uniformly, and a slice within it uniformly."""

    def draw(self, index: TrajectoryIndex, count: int, length: int, generator: torch.Generator | None = None) -> Slices:
        """Draw ``count`` slices of at most ``length`` steps."""
        counts = index.run_counts()
        runs = index.nth_run(below(counts.sum(), uniform(count, index, generator)), counts)
        return slices_within(index, runs, length, generator)


class Priorities:
    """Priorities of the stored steps, which are drawn with probability ``p_i / sum_k p_k``.

    ``p = (priority + eps) ** alpha``. New steps get the largest priority so far, 1 at first. Sums are kept in a tree of
    float64 numbers whose nodes are recomputed from their children.

    Args:
        alpha: exponent of the priorities.
        beta: exponent of the importance weights.
        eps: added to every priority, so that none is zero.
        slices: draw only steps at which a slice can start. Otherwise all steps can be drawn.
        strict: slices have full length. Otherwise a slice can also start where a shorter run begins.

    Attributes:
        priority: ``p`` of every position, float64 ``[N]``, 0 where nothing was stored.
        largest: the largest priority set so far, float64 scalar.
        length: length of the slices that the tree is for; None if unknown or for single steps.
    """

    def __init__(self, alpha: float, beta: float, eps: float, *, slices: bool = False, strict: bool = False) -> None:
        self.alpha = alpha
        self.beta = beta
        self.eps = eps
        self.slices = slices
        self.strict = strict
        self.length: int | None = None
        self.allocate(1, "cpu")

    def allocate(self, size: int, device: torch.device | str) -> None:
        """Allocate memory for the priorities of ``size`` positions."""
        self.tree = PriorityTree(size, device)
        self.priority = torch.zeros_like(self.tree.leaves) if self.slices else self.tree.leaves
        self.largest = torch.ones((), dtype=torch.float64, device=device)

    def append(self, index: TrajectoryIndex, positions: Tensor) -> None:
        """Give new steps, at positions ``[lanes, n]``, the largest priority."""
        flat = positions.flatten()
        self.priority.index_copy_(0, flat, ((self.largest + self.eps) ** self.alpha).expand(flat.shape))
        if not self.slices:
            self.tree.refresh(flat)
        elif self.length is not None:
            reach = min(positions.shape[1] + self.length - 1, index.capacity)
            self._place(index, torch.cat([index.newest_positions(reach), index.oldest_positions()]))

    def assign(self, index: TrajectoryIndex, positions: Tensor, priority: Tensor, good: Tensor | None = None) -> None:
        """Set the priorities of steps; if a step occurs repeatedly, its largest priority is used.

        Args:
            index: index of the stored steps.
            positions: int64 ``[M]``.
            priority: finite and not negative, ``[M]``.
            good: bool scalar; if False, nothing changes.
        """
        new = priority.double()
        largest = self.largest.maximum(new.amax())
        new = (new + self.eps) ** self.alpha
        if good is not None:
            largest = torch.where(good, largest, self.largest)
            new = torch.where(good, new, self.priority[positions])
        self.largest.copy_(largest)
        self.priority.scatter_reduce_(0, positions, new, "amax", include_self=False)
        if self.slices:
            self._place(index, positions)
        else:
            self.tree.refresh(positions)

    def prepare(self, index: TrajectoryIndex, length: int) -> None:
        """Prepare for slices of ``length`` steps; waits for the device if the previous ones had another length."""
        if self.slices and length != self.length:
            self.length = length
            self._place(index, index.all_positions())

    def find(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw the positions of ``count`` steps."""
        total = self.tree.total
        return self.tree.find(torch.rand(count, dtype=total.dtype, device=total.device, generator=generator) * total)

    def weights(self, positions: Tensor) -> Tensor:
        """Return the importance weights of steps, float64 ``[N]``."""
        return (self.tree.leaves[positions] / self.tree.minimum) ** -self.beta

    def draw(self, index: TrajectoryIndex, count: int, length: int, generator: torch.Generator | None = None) -> Slices:
        """Draw steps, and slices that begin at them, or around them if all steps can be drawn."""
        self.prepare(index, length)
        found = self.find(count, generator)
        weights = self.weights(found)
        if not self.slices:
            return slices_around(index, found, length, generator)._replace(weights=weights)
        lanes, _, stop = index.bounds(index.run_at(found))
        first = index.steps(found)
        return Slices(lanes, first, (stop - first).clamp_max(length), weights)

    def _place(self, index: TrajectoryIndex, positions: Tensor) -> None:
        """Update the tree at ``positions``, if the length of slices is known."""
        if self.length is None:
            return
        steps = index.steps(positions)
        _, first, stop = index.bounds(index.run_at(positions))
        can_start = steps + self.length <= stop
        if not self.strict:
            can_start |= steps == first
        self.tree.set(positions, torch.where(can_start & (steps >= 0), self.priority[positions], 0.0))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""
        return {
            "max_priority": self.largest.item(),
            "priorities": self.priority.clone(),
            "tree": self.tree.leaves.clone(),
            "sums": self.tree.inner_sums(),
            "length": self.length,
            "slices": self.slices,
            "strict": self.strict,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict` in place; it may be that of another rule, or for more or fewer positions.

        Raises:
            ArgumentError: a number is out of range.
        """
        highest, length = state["max_priority"], state.get("length")
        if type(highest) is not float or not 0 <= highest < torch.inf:
            raise ArgumentError(
                f"The saved max_priority must be a finite number that isn't negative, got {highest!r:.80}."
            )
        if length is not None and (type(length) is not int or length < 1):
            raise ArgumentError(f"The saved length of slices must be a positive integer or None, got {length!r:.80}.")
        priority, tree = state.get("priorities", state["tree"]), state["tree"]
        slices = state.get("slices", not torch.equal(priority, tree))  # absent from earlier formats
        same = slices == self.slices and state.get("strict", self.strict) == self.strict
        self.largest.fill_(highest)
        _fill(self.priority, priority)
        self.length = length if same and self.slices else None
        if self.slices:
            _fill(self.tree.leaves, tree)
        self.tree.restore(state.get("sums") if same and tree.shape == self.tree.leaves.shape else None)


class ByPriority(Priorities):
    """Draws slices with a probability proportional to the priority of a step.

    Args:
        alpha: exponent of the priorities.
        beta: exponent of the importance weights.
        by_step: draw slices around the steps. Otherwise slices begin at the steps, which are drawn only where a slice
            of full length or the whole of a shorter run begins.
        eps: added to every priority, so that none is zero.
    """

    def __init__(self, alpha: float, beta: float, *, by_step: bool, eps: float = 1e-8) -> None:
        super().__init__(alpha, beta, eps, slices=not by_step)


def _fill(numbers: Tensor, saved: Tensor) -> None:
    """Copy saved numbers by position; a storage may use fewer positions than a sampler has, and the others are 0."""
    count = min(numbers.numel(), saved.numel())
    numbers[:count].copy_(saved[:count])
    numbers[count:].zero_()


def uniform(count: int, index: TrajectoryIndex, generator: torch.Generator | None) -> Tensor:
    """Draw ``count`` float64 numbers, uniform in [0, 1), on the device of the index."""
    return torch.rand(count, dtype=torch.float64, device=index.device, generator=generator)


def slices_around(index: TrajectoryIndex, positions: Tensor, length: int, generator: torch.Generator | None) -> Slices:
    """Return slices, each containing a given step at a random offset.

    A slice that would extend beyond its trajectory is shifted, so that the first and last steps of trajectories are
    about as frequent as others, in slices of full length.

    Args:
        index: index of the stored steps.
        positions: positions of the given steps, int64 ``[S]``.
        length: number of steps of a slice; a shorter trajectory is taken as a whole.
        generator: generator of the random offsets; torch's default generator when None.
    """
    lanes, first, stop = index.bounds(index.run_at(positions))
    lengths = (stop - first).clamp_max(length)
    begin = index.steps(positions) - below(lengths, uniform(positions.shape[0], index, generator))
    return Slices(lanes, begin.maximum(first).minimum(stop - lengths), lengths)


def slices_within(
    index: TrajectoryIndex,
    runs: Tensor,
    length: int,
    generator: torch.Generator | None,
    span: tuple[int, int] = (0, 0),
) -> Slices:
    """Return one slice of each run, drawn uniformly.

    Args:
        index: index of the stored steps.
        runs: runs, int64 ``[S]``.
        length: number of steps of a slice; a shorter run is taken as a whole.
        generator: generator of the random offsets; torch's default generator when None.
        span: numbers of steps by which slices may extend beyond the beginning and the end of a run, where they are cut.
    """
    lanes, first, stop = index.bounds(runs)
    available = stop - first
    wanted = available.clamp_max(length)
    before, after = ((wanted - 1).clamp_max(side) for side in span)
    offset = below(available - wanted + before + after + 1, uniform(runs.shape[0], index, generator)) - before
    begin = offset.clamp_min(0)
    return Slices(lanes, first + begin, (offset + wanted).minimum(available) - begin)
