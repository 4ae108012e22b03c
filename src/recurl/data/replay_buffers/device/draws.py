"""Sampling of slices with tensor operations, by the rules of ``SliceSampler`` and ``PrioritizedSliceSampler``."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.data.replay_buffers.device.ring import Ring, below

__all__ = ["ByPriority", "ByStep", "ByTrajectory", "Drawing", "Drawn"]

_FAN_OUT = 64  # children of a node in the tree of sums


class Drawn(NamedTuple):
    """Sampled slices.

    Attributes:
        lanes: lane of each slice, int64 ``[S]``.
        first: first step number of each slice, int64 ``[S]``.
        lengths: number of steps of each slice, int64 ``[S]``.
        weights: importance weight of each slice, float64 ``[S]``, or None.
    """

    lanes: Tensor
    first: Tensor
    lengths: Tensor
    weights: Tensor | None = None


class Drawing(Protocol):
    """Rule for sampling slices."""

    def draw(self, ring: Ring, count: int, length: int) -> Drawn:
        """Draw ``count`` slices of at most ``length`` steps; shorter runs are taken as a whole."""
        ...


class ByStep:
    """Draws a step uniformly, and a slice around it."""

    def draw(self, ring: Ring, count: int, length: int) -> Drawn:
        """Draw ``count`` slices of at most ``length`` steps."""
        drawn = ring.nth(below(ring.filled * ring.lanes, _uniform(count, ring)))
        return _around(ring, drawn, length)


class ByTrajectory:
    """Draws a run uniformly, and a slice within it uniformly."""

    def draw(self, ring: Ring, count: int, length: int) -> Drawn:
        """Draw ``count`` slices of at most ``length`` steps."""
        counted = ring.run_starts()
        run = below(counted[-1], _uniform(count, ring))
        begin = torch.searchsorted(counted, run, right=True)
        lanes, offset = begin // ring.capacity, begin % ring.capacity
        following = torch.searchsorted(counted, run + 1, right=True) - lanes * ring.capacity
        available = following.minimum(ring.filled) - offset
        lengths = available.clamp_max(length)
        place = below(available - lengths + 1, _uniform(count, ring))
        return Drawn(lanes, ring.oldest + offset + place, lengths)


class ByPriority:
    """Draws steps with probability ``p_i / sum_k p_k``, ``p = (priority + eps) ** alpha``, and a slice for each.

    Sums are recomputed in float64 at every draw, by a tree with 64 children per node and a fixed order of additions.
    Repeated draws on one device are therefore bitwise equal, and no error accumulates.

    Args:
        alpha: exponent of the priorities.
        beta: exponent of the importance weights.
        by_step: draw slices around the steps. Otherwise slices begin at the steps, which are drawn only where a whole
        eps: added to every priority, so that none is zero.

    Attributes:
        priority: ``p`` of every position, float64 ``[N]``, 0 where nothing is stored.
        largest: the largest priority set so far, which new steps get, float64 scalar.
    """

    def __init__(self, alpha: float, beta: float, *, by_step: bool, eps: float = 1e-8) -> None:
        self.alpha = alpha
        self.beta = beta
        self.eps = eps
        self.by_step = by_step
        self.prepare(0, "cpu")

    def prepare(self, size: int, device: torch.device | str) -> None:
        """Allocate memory for the priorities of ``size`` positions."""
        self.priority = torch.zeros(size, dtype=torch.float64, device=device)
        self.largest = torch.ones((), dtype=torch.float64, device=device)

    def appended(self, positions: Tensor) -> None:
        """Give new steps the largest priority."""
        self.priority.index_copy_(0, positions, ((self.largest + self.eps) ** self.alpha).expand(positions.shape))

    def update(self, positions: Tensor, priority: Tensor, good: Tensor) -> None:
        """Set the priorities of steps; if a step occurs repeatedly, its largest priority is used.

        Args:
            positions: int64 ``[M]``.
            priority: finite and not negative, ``[M]``.
            good: bool scalar; if False, nothing changes.
        """
        new = priority.double()
        self.largest.copy_(torch.where(good, self.largest.maximum(new.amax()), self.largest))
        new = torch.where(good, (new + self.eps) ** self.alpha, self.priority[positions])
        self.priority.scatter_reduce_(0, positions, new, "amax", include_self=False)

    def draw(self, ring: Ring, count: int, length: int) -> Drawn:
        """Draw ``count`` slices of at most ``length`` steps."""
        shares = self.priority if self.by_step else self.priority * ring.can_start(length)
        levels, total = _sums(shares)
        found = _find(levels, _uniform(count, ring) * total)
        least = torch.where(shares > 0, shares, torch.inf).amin()
        weights = (shares[found] / least) ** -self.beta
        if self.by_step:
            return _around(ring, found, length)._replace(weights=weights)
        return Drawn(found // ring.capacity, ring.steps(found), ring.following(found, length), weights)


def _uniform(count: int, ring: Ring) -> Tensor:
    return torch.rand(count, dtype=torch.float64, device=ring.first.device)


def _around(ring: Ring, positions: Tensor, length: int) -> Drawn:
    """Return slices that contain the steps at ``positions`` at a random offset, shifted to stay within their runs."""
    step, first = ring.steps(positions), ring.begins(positions)
    stop = step + ring.following(positions, length)
    lengths = (stop - first).clamp_max(length)
    begin = step - below(lengths, _uniform(positions.shape[0], ring))
    return Drawn(positions // ring.capacity, begin.maximum(first).minimum(stop - lengths), lengths)


def _sums(shares: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the levels of a sum tree, ``[nodes, 64]`` each, leaves first, and the total."""
    levels = list[Tensor]()
    while shares.numel() > 1 or not levels:
        levels.append(F.pad(shares, (0, -shares.numel() % _FAN_OUT)).view(-1, _FAN_OUT))
        shares = levels[-1].sum(-1)
    return levels, shares[0]


def _find(levels: list[Tensor], mass: Tensor) -> Tensor:
    """Return the leaves at which the cumulative sum exceeds ``mass`` (from 0 to the total, exclusive)."""
    node = torch.zeros_like(mass, dtype=torch.int64)
    child = torch.arange(_FAN_OUT, device=mass.device)
    for level in reversed(levels):
        shares = level[node]
        sums = shares.cumsum(-1)
        last = torch.where(shares > 0, child, 0).amax(-1)  # rounding must not select a leaf with probability 0
        chosen = (sums <= mass.unsqueeze(-1)).sum(-1).minimum(last)
        before = sums.gather(-1, (chosen - 1).clamp_min(0).unsqueeze(-1)).squeeze(-1)
        mass = mass - torch.where(chosen > 0, before, 0.0)
        node = node * _FAN_OUT + chosen
    return node
