"""Sum and minimum tree of priorities, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["PriorityTree"]


class PriorityTree:
    """Binary tree over ``size`` non-negative numbers, with updates and proportional sampling in O(log size).

    Inner nodes are recomputed from their children in float64, so errors don't accumulate. Zero means "absent": it is
    never sampled and is ignored by the minimum.

    Args:
        size: number of leaves.

    Example:
        >>> tree = PriorityTree(5)
        >>> tree.set(np.array([1, 4]), np.array([1.0, 3.0]))
        >>> tree.total, tree.minimum
        (4.0, 1.0)
        >>> tree.find(np.array([0.5, 1.5, 3.9])).tolist()
        [1, 4, 4]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._depth = max(size - 1, 1).bit_length()
        self._leaf = 1 << self._depth
        self._sum = np.zeros(2 * self._leaf)
        self._min = np.full(2 * self._leaf, np.inf)

    @property
    def total(self) -> float:
        """Sum of all numbers."""
        return float(self._sum[1])

    @property
    def minimum(self) -> float:
        """Smallest nonzero number; infinity if all are zero."""
        return float(self._min[1])

    def __getitem__(self, index: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._sum[self._leaf + index]

    def set(self, index: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Write ``values`` at ``index``, both ``[n]``; if an index occurs repeatedly, its last value is used."""
        if index.size == 0:
            return
        node = self._leaf + index
        self._sum[node] = values
        self._min[node] = np.where(self._sum[node] > 0, self._sum[node], np.inf)
        for _ in range(self._depth):
            node = node >> 1
            node = node[np.append(True, node[1:] != node[:-1])]
            left = 2 * node
            self._sum[node] = self._sum[left] + self._sum[left + 1]
            self._min[node] = np.minimum(self._min[left], self._min[left + 1])

    def find(self, mass: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the indices at which the cumulative sum exceeds ``mass`` (from 0 to :attr:`total`, exclusive)."""
        node = np.ones(mass.shape, np.int64)
        mass = mass.copy()
        for _ in range(self._depth):
            left = self._sum[2 * node]
            right = (mass >= left) & (self._sum[2 * node + 1] > 0)
            mass -= np.where(right, left, 0.0)
            node = 2 * node + right
        return node - self._leaf
