"""Order of the gates in the buffers that kernels and large products share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


def padded(hidden: int) -> int:
    """Return the smallest power of two, at least 16, that holds ``hidden`` units."""
    return max(16, 1 << (hidden - 1).bit_length())


@dataclass(frozen=True, eq=False)
class GateLayout:
    """Columns of the input product and of the gates' gradients; W is H, padded where the kernel requires it.

    The input product has G * W columns. LSTM: i, f, g, o. GRU: n, r, z. The gradients have 4 * W columns. LSTM: the
    same order. GRU: input part of n, r, z, hidden part of n. So the first G * W columns belong to the input product, in
    its order, and the last G * W to the hidden product. If interleaved, the gates of a unit are adjacent, except n's.
    Layouts are compared by identity, which makes them fast cache keys.

    Attributes:
        lstm: whether the cell is an LSTM; else it is a GRU.
        hidden: H.
        width: W.
        interleaved: whether the gates of a unit are adjacent.
    """

    lstm: bool
    hidden: int
    width: int
    interleaved: bool

    @property
    def num_gates(self) -> int:
        """Number of gates G."""
        return 4 if self.lstm else 3

    @cached_property
    def constants(self) -> dict[str, int]:
        """Compile-time arguments of kernels that read or write in this layout."""
        return {"HIDDEN": self.hidden, "WIDTH": self.width, "LSTM": self.lstm, "INTERLEAVED": self.interleaved}

    def columns(self, hidden_part: bool) -> list[int]:
        """Return for each column its row in ``[G * W]`` in the order of torch.nn (gate-major)."""
        w = self.width
        if self.lstm:
            gates = [[gate * w + unit for unit in range(w)] for gate in range(4)]
            return _mixed(gates) if self.interleaved else [row for gate in gates for row in gate]
        r, z, n = ([gate * w + unit for unit in range(w)] for gate in range(3))
        both = _mixed([r, z]) if self.interleaved else r + z
        return both + n if hidden_part else n + both


def _mixed(gates: list[list[int]]) -> list[int]:
    return [row for unit in zip(*gates, strict=True) for row in unit]
