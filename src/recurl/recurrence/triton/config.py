"""How the work of one layer is cut, by table: no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass

_ROWS = 16


@dataclass(frozen=True)
class Tile:
    """What one launch of a recurrence kernel is made of.

    Attributes:
        rows: slots that a group of programs walks together.
        units: hidden units of one program.
        members: programs of a group; together they hold all hidden units.
        block_k: rows of the recurrent weights in one product.
        resident: the weights are loaded once, before the first step.
        warps: per program.
    """

    rows: int
    units: int
    members: int
    block_k: int
    resident: bool
    warps: int


_UNITS = 64  # at most, of one program: eight warps with eight units each
# Registers per thread that resident weights may take: the backward walk needs more of them for itself.
_WEIGHT_REGISTERS = {"forward": 128, "backward": 48}
_BLOCK_K = {"bf16": 32, "tf32": 32, "tf32x3": 16, "ieee": 16}


def padded(hidden: int) -> int:
    """The power of two, at least 16, that holds ``hidden`` units."""
    return max(16, 1 << (hidden - 1).bit_length())


def tile_for(direction: str, hidden: int, num_gates: int, precision: str) -> Tile:
    """Return the tile of a plain kernel for H = ``hidden``.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        hidden: H.
        num_gates: G.
        precision: of the recurrent products: ``"ieee"``, ``"tf32"``, ``"tf32x3"`` or ``"bf16"``.
    """
    width = padded(hidden)
    units = min(width, _UNITS)
    registers = width * num_gates // (8 if precision == "bf16" else 4)
    resident = precision in ("tf32", "bf16") and registers <= _WEIGHT_REGISTERS[direction]
    return Tile(_ROWS, units, width // units, width if resident else _BLOCK_K[precision], resident, max(4, units // 8))
