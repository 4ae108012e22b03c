"""In which order gates stand in the buffers that kernels and large products share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False)
class Layout:
    """The columns of the input product and of the gradients of the gates; W is H, padded where the kernel wants it.

    The input product has G * W columns. LSTM: i, f, g, o. GRU: n, r, z. The gradients have 4 * W: LSTM the same, GRU
    n's input part, r, z, n's hidden part. So the first G * W of them belong to the input product in its own order, and
    the last G * W to the hidden product. Interleaved, the gates of one unit stand together, but for those of n.
    A layout is equal to itself alone, so that it is a quick key.

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

    @cached_property
    def constants(self) -> dict[str, int]:
        """Of the kernels that read or write in this layout."""
        return {"HIDDEN": self.hidden, "WIDTH": self.width, "LSTM": self.lstm, "INTERLEAVED": self.interleaved}

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
