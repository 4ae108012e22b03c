"""Index of consecutive stored steps, as tensors on a device.

Lanes, positions, step numbers and runs are defined as in :mod:`recurl.data.replay_buffers.trajectories`. All lanes are
written together, so they share one count of steps. Nothing here waits for the device, and no shape depends on data.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Ring", "below"]


def below(limits: Tensor, uniform: Tensor) -> Tensor:
    """Map float64 numbers, uniform in [0, 1), to integers in [0, limits).

    Example:
        >>> below(torch.tensor([2, 3]), torch.tensor([0.5, 0.0], dtype=torch.float64)).tolist()
        [1, 0]
    """
    return torch.minimum((uniform * limits).long(), limits - 1)


class Ring:
    """Index of the runs of stored steps.

    Args:
        lanes: number of lanes.
        capacity: number of positions per lane.
        device: where the tensors are.

    Attributes:
        written: number of steps ever written to each lane, int64 scalar.
        first: first step number of the run at each position, int64 ``[lanes, capacity]``.

    Example:
        >>> ring = Ring(1, 4, "cpu")
        >>> ring.append(torch.tensor([[True, False, False, True]])).tolist()
        [[0, 1, 2, 3]]
        >>> ring.append(torch.tensor([[False]])).tolist()  # full: overwrites the oldest step
        [[0]]
        >>> ring.begins(torch.arange(4)).tolist(), ring.following(torch.arange(4), 3).tolist()
        ([3, 1, 1, 3], [1, 2, 1, 2])
    """

    def __init__(self, lanes: int, capacity: int, device: torch.device | str) -> None:
        self.lanes = lanes
        self.capacity = capacity
        self.written = torch.zeros((), dtype=torch.int64, device=device)
        self.first = torch.zeros(lanes, capacity, dtype=torch.int64, device=device)
        self._offsets = torch.arange(capacity, device=device)
        self._base = torch.arange(lanes, device=device).unsqueeze(-1) * capacity

    @property
    def filled(self) -> Tensor:
        """Number of steps stored in each lane."""
        return self.written.clamp_max(self.capacity)

    @property
    def oldest(self) -> Tensor:
        """Step number of the oldest stored step of each lane."""
        return self.written - self.filled

    def append(self, starts: Tensor) -> Tensor:
        """Add steps to every lane, overwriting the oldest ones of a full ring, and return their positions.

        Args:
            starts: bool ``[lanes, n]``, True where a step begins a run; n is at most ``capacity``.
        """
        steps = self.written + torch.arange(starts.shape[1], device=starts.device)
        offsets = steps % self.capacity
        before = self.first.index_select(1, (steps[:1] - 1) % self.capacity)
        begun = torch.where(starts | (steps == 0), steps, before).cummax(1).values
        self.first.index_copy_(1, offsets, begun)
        self.written.add_(starts.shape[1])
        return self._base + offsets

    def steps(self, positions: Tensor) -> Tensor:
        """Return the step numbers of the steps at ``positions``; negative where nothing is stored."""
        newest = self.written - 1
        return newest - (newest - positions % self.capacity) % self.capacity

    def positions(self, lanes: Tensor, steps: Tensor) -> Tensor:
        """Return the positions of steps, given by lane and step number."""
        return lanes * self.capacity + steps % self.capacity

    def nth(self, ordinals: Tensor) -> Tensor:
        """Return the positions of the n-th stored steps, counted lane by lane."""
        return ordinals // self.filled * self.capacity + ordinals % self.filled

    def begins(self, positions: Tensor) -> Tensor:
        """Return the number of the first stored step of the run of each position."""
        return self._first_at(positions).maximum(self.oldest)

    def following(self, positions: Tensor, most: int) -> Tensor:
        """Return the number of stored steps of the run from each position on, inclusive, capped at ``most``."""
        ahead = self.steps(positions).unsqueeze(-1) + torch.arange(most, device=positions.device)
        at = self.positions((positions // self.capacity).unsqueeze(-1), ahead)
        same = self._first_at(at) == self._first_at(positions).unsqueeze(-1)
        return (same & (ahead < self.written)).sum(-1)

    def can_start(self, length: int) -> Tensor:
        """Return bool ``[N]``: whether a slice may start, because ``length`` steps are available or a run begins.

        The value is arbitrary at positions where nothing is stored.
        """
        steps, ahead = self.steps(self._offsets), length - 1
        whole = (self.first.roll(-ahead, 1) == self.first) & (steps + ahead < self.written)
        return (whole | (steps == self.first.maximum(self.oldest))).flatten()

    def run_starts(self) -> Tensor:
        """Return the cumulative count of run starts, int64 ``[lanes * capacity]``, in the order of lanes and steps."""
        steps = self.oldest + self._offsets
        begins = self.begins(self._base + steps % self.capacity)
        return ((begins == steps) & (steps < self.written)).flatten().cumsum(0)

    def _first_at(self, positions: Tensor) -> Tensor:
        return self.first.flatten()[positions]
