"""Numbers for trajectories, never the same for two of them."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["TRAJECTORY_IDS", "TrajectoryIds"]

_BLOCK = 2**40


class TrajectoryIds:
    """Hands out ids that no two trajectories share, in this process and the workers it starts.

    A process counts inside a block of 2^40 numbers; each worker gets a block of its own.

    Example:
        >>> ids = TrajectoryIds()
        >>> ids.take(torch.Size([2]), None), ids.take(torch.Size([]), None)
        (tensor([0, 1]), tensor(2))
        >>> ids.reserve() == 2**40
        True
    """

    def __init__(self) -> None:
        self._next = 0
        self._last_block = 0
        self._lock = threading.Lock()

    def take(self, shape: torch.Size, device: torch.device | None) -> Tensor:
        """Return new ids, int64 of ``shape``."""
        count = shape.numel()
        with self._lock:
            first, self._next = self._next, self._next + count
        return torch.arange(first, first + count, device=device).reshape(shape)

    def skip(self, used: Tensor) -> None:
        """Never hand out ``used`` ids, nor any from their blocks to new workers."""
        last = int(used.max())
        with self._lock:
            self._last_block = max(self._last_block, last // _BLOCK)
            if last // _BLOCK == self._next // _BLOCK:
                self._next = max(self._next, last + 1)

    def reserve(self) -> int:
        """Return the first id of a block for a worker."""
        with self._lock:
            self._last_block += 1
            return self._last_block * _BLOCK

    def start_at(self, first: int) -> None:
        """Hand out ids from ``first`` on: in a worker, which was given a block."""
        with self._lock:
            self._next = first


TRAJECTORY_IDS = TrajectoryIds()
"""The ids of this process."""
