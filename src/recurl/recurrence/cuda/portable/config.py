"""Tiles of the portable kernels, by table: no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from recurl.recurrence.cuda.layout import padded

__all__ = ["Tile", "tile_for"]

_ROWS = 16


@dataclass(frozen=True)
class Tile:
    """Tile sizes of a plain recurrence kernel.

    Attributes:
        rows: slots that a group of programs processes together.
        units: hidden units of one program.
        members: programs of a group; together they hold all hidden units.
        block_k: rows of the recurrent weights in one product.
        resident: whether the weights are loaded once, before the first step.
        warps: warps per program.
    """

    rows: int
    units: int
    members: int
    block_k: int
    resident: bool
    warps: int


_UNITS = 64  # most units of a program: eight warps with eight units each
# Registers per thread that resident weights may take: the backward pass needs more of them for other values.
_WEIGHT_REGISTERS = {"forward": 128, "backward": 48}
_BLOCK_K = {"bf16": 32, "tf32": 32, "ieee": 16}


def tile_for(direction: str, hidden: int, num_gates: int, precision: str) -> Tile:
    """Return the tile of a plain kernel for H = ``hidden``.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        hidden: H.
        num_gates: G.
        precision: precision of the recurrent products: ``"ieee"``, ``"tf32"`` or ``"bf16"``.
    """
    return _tile(direction, hidden, num_gates, precision)


@lru_cache(maxsize=256)
def _tile(direction: str, hidden: int, num_gates: int, precision: str) -> Tile:
    # A separate function, because torch 2.11 can't compile calls of an attribute that is a cached function.
    width = padded(hidden)
    units = min(width, _UNITS)
    registers = width * num_gates // (8 if precision == "bf16" else 4)
    resident = precision in ("tf32", "bf16") and registers <= _WEIGHT_REGISTERS[direction]
    return Tile(_ROWS, units, width // units, width if resident else _BLOCK_K[precision], resident, max(4, units // 8))
