"""Sum and minimum tree of priorities, as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PriorityTree"]

_FAN_OUT = 64  # children of a node


class PriorityTree:
    """Tree over ``size`` non-negative numbers, with updates and proportional sampling in O(log size).

    Inner nodes are recomputed from their children in float64, so errors don't accumulate. Zero means "absent": it is
    never sampled and is ignored by the minimum. Nothing waits for the device, and no shape depends on data.

    Args:
        size: number of leaves.
        device: device of the tensors.

    Attributes:
        leaves: the numbers, float64 ``[size]``; call :meth:`refresh` after changing them.

    Example:
        >>> tree = PriorityTree(5)
        >>> tree.set(torch.tensor([1, 4]), torch.tensor([1.0, 3.0]))
        >>> tree.total.item(), tree.minimum.item()
        (4.0, 1.0)
        >>> tree.find(torch.tensor([0.5, 1.5, 3.9])).tolist()
        [1, 4, 4]
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        counts = [size]
        while counts[-1] > 1 or len(counts) == 1:
            counts.append(-(-counts[-1] // _FAN_OUT))
        rows = [(max(count, 1) + _FAN_OUT - 1) // _FAN_OUT for count in counts]
        self._sums = [torch.zeros(count, _FAN_OUT, dtype=torch.float64, device=device) for count in rows]
        self._minima = [torch.full_like(sums, torch.inf) for sums in self._sums[1:]]
        self._zero = self._sums[0].new_zeros(())
        self.leaves = self._sums[0].view(-1)[:size]

    @property
    def total(self) -> Tensor:
        """Sum of all numbers, scalar."""
        return self._sums[-1][0, 0]

    @property
    def minimum(self) -> Tensor:
        """Smallest nonzero number, scalar; infinity if all are zero."""
        return self._minima[-1][0, 0]

    def set(self, index: Tensor, values: Tensor) -> None:
        """Write ``values`` at ``index``, both ``[n]``; an index may occur repeatedly with equal values only."""
        self.leaves.index_copy_(0, index, values.double())
        self.refresh(index)

    def refresh(self, index: Tensor) -> None:
        """Recompute the nodes above the leaves ``index``, int64 ``[n]``."""
        if index.numel() == 0:
            return
        for level, (sums, above) in enumerate(zip(self._sums, self._sums[1:], strict=False)):
            minima = self._minima[level - 1] if level else None
            index = index // _FAN_OUT
            if index.numel() < sums.shape[0]:
                _refresh(sums[index], None if minima is None else minima[index], above, self._minima[level], index)
            else:  # all nodes of the level
                _refresh(sums, minima, above, self._minima[level], None)

    def find(self, mass: Tensor) -> Tensor:
        """Return the indices at which the cumulative sum exceeds ``mass`` (from 0 to :attr:`total`, exclusive)."""
        node = torch.zeros_like(mass, dtype=torch.int64)
        for sums in reversed(self._sums[:-1]):
            ends = sums[node].cumsum(-1)
            mass = mass.minimum(ends[:, -1].nextafter(self._zero))  # rounding must not select an absent number
            child = torch.searchsorted(ends, mass.unsqueeze(-1), right=True)
            before = ends.gather(-1, (child - 1).clamp_min(0)).masked_fill(child == 0, 0.0)
            mass = mass - before.squeeze(-1)
            node = node * _FAN_OUT + child.squeeze(-1)
        return node

    def inner_sums(self) -> Tensor:
        """Return the inner nodes, whose rounding depends on earlier updates; :meth:`restore` sets them."""
        return torch.cat([sums.view(-1) for sums in self._sums[1:]])

    def restore(self, inner: Tensor | None) -> None:
        """Recompute all nodes from the leaves, and set the inner ones to :meth:`inner_sums` if given."""
        self.refresh(torch.arange(self.leaves.numel(), device=self.leaves.device))
        if inner is not None:
            parts = inner.split([sums.numel() for sums in self._sums[1:]])
            for sums, part in zip(self._sums[1:], parts, strict=True):
                sums.view(-1).copy_(part)


def _refresh(
    shares: Tensor, minima: Tensor | None, sums_above: Tensor, minima_above: Tensor, index: Tensor | None
) -> None:
    """Write the sums and minima of rows of children to the nodes ``index`` above, or to the first ones."""
    sums = shares.sum(-1)
    least = (torch.where(shares > 0, shares, torch.inf) if minima is None else minima).amin(-1)
    for above, values in ((sums_above.view(-1), sums), (minima_above.view(-1), least)):
        if index is None:
            above[: values.numel()].copy_(values)
        else:
            above.index_copy_(0, index, values)
