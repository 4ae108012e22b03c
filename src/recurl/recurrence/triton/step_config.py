"""How a step is cut into programs on a GPU, by rule: no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST = 256
"""Units of the largest layer that takes its steps in one kernel."""


@dataclass(frozen=True)
class StepTile:
    """What one program of the step's kernel computes; powers of two.

    Attributes:
        rows: of the batch.
        units: of the layer, of which it computes all gates.
        depth: units of the input, or of h, that are multiplied at a time.
        warps: per program.
        stages: pieces of the depth that are fetched at once.
    """

    rows: int
    units: int
    depth: int
    warps: int
    stages: int


# From large to small, as the least number of programs asks for.
_TILES = ((128, 32, 8), (64, 32, 8), (32, 32, 8), (32, 16, 4), (16, 16, 4))


def tile_for_step(rows: int, hidden: int, precision: str, processors: int) -> StepTile:
    """Return the largest tile, of which half is used, that leaves few multiprocessors idle, or else the smallest.

    Args:
        rows: B.
        hidden: H.
        precision: ``"ieee"`` (accurate to float32), ``"tf32"`` or ``"bf16"``.
        processors: multiprocessors of the GPU.
    """
    widest = max(16, 1 << (hidden - 1).bit_length())
    tallest = max(16, 1 << (rows - 1).bit_length())
    fitting = [tile for tile in _TILES if tile[0] <= tallest and tile[1] <= widest]
    enough = (tile for tile in fitting if 4 * -(-rows // tile[0]) * -(-hidden // tile[1]) >= 3 * processors)
    tile_rows, units, warps = next(enough, fitting[-1])
    # What is in flight must fit into the 99 KB of the smallest chips.
    deep = precision == "bf16" or (precision == "tf32" and units == 16)
    return StepTile(tile_rows, units, 64 if deep else 32, warps, 3 if tile_rows >= 64 else 4)
