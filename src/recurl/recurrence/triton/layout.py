"""In which order gates stand in the buffers that kernels and large products share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The columns of the input product and of the gradients of the gates; W is H, padded where the kernel wants it.

    The input product has G * W columns. LSTM: i, f, g, o. GRU: n, r, z. The gradients have 4 * W: LSTM the same, GRU
    n's input part, r, z, n's hidden part. So the first G * W of them belong to the input product in its own order, and
    the last G * W to the hidden product. Interleaved, the gates of one unit stand together, but for those of n.

    Attributes:
        lstm: which cell.
        hidden: H.
        width: W.
        interleaved: whether the gates of a unit stand together.
    """

    lstm: bool
    hidden: int
    width: int
    interleaved: bool

    @property
    def num_gates(self) -> int:
        """G."""
        return 4 if self.lstm else 3

    def arrange(self, rows: Tensor) -> Tensor:
        """Bring ``[G * H, ...]`` in the order of torch.nn into the order of the input product, ``[G * W, ...]``."""
        if self._is_natural:
            return rows
        if self.width != self.hidden:
            by_gate = rows.reshape(self.num_gates, self.hidden, -1)
            padded = F.pad(by_gate, (0, 0, 0, self.width - self.hidden))
            rows = padded.reshape(self.num_gates * self.width, *rows.shape[1:])
        return rows.index_select(0, _order(self, False, rows.device))

    def restore_input(self, rows: Tensor) -> Tensor:
        """Undo :meth:`arrange`: ``[G * W, ...]`` in the order of the input product to ``[G * H, ...]``."""
        return rows if self._is_natural else rows.index_select(0, _places(self, False, rows.device))

    def restore_hidden(self, rows: Tensor) -> Tensor:
        """Bring ``[G * W, ...]`` in the order of the hidden part of the gradients to that of torch.nn."""
        natural = self._is_natural or (not self.lstm and not self.interleaved and self.width == self.hidden)
        return rows if natural else rows.index_select(0, _places(self, True, rows.device))

    @property
    def _is_natural(self) -> bool:
        return self.lstm and not self.interleaved and self.width == self.hidden

    def columns(self, hidden_part: bool) -> list[int]:
        """For each column the row of ``[G * W]`` in the order of torch.nn (gate-major) that stands there."""
        w = self.width
        if self.lstm:
            gates = [[gate * w + unit for unit in range(w)] for gate in range(4)]
            return _mixed(gates) if self.interleaved else [row for gate in gates for row in gate]
        r, z, n = ([gate * w + unit for unit in range(w)] for gate in range(3))
        both = _mixed([r, z]) if self.interleaved else r + z
        return both + n if hidden_part else n + both


def _mixed(gates: list[list[int]]) -> list[int]:
    return [row for unit in zip(*gates, strict=True) for row in unit]


@lru_cache(maxsize=64)
def _order(layout: Layout, hidden_part: bool, device: torch.device) -> Tensor:
    return torch.tensor(layout.columns(hidden_part), device=device)


@lru_cache(maxsize=64)
def _places(layout: Layout, hidden_part: bool, device: torch.device) -> Tensor:
    order = torch.tensor(layout.columns(hidden_part))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0])
    return place.view(layout.num_gates, layout.width)[:, : layout.hidden].reshape(-1).to(device)
