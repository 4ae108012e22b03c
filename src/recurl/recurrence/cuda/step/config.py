"""Tiles of the step kernel on a GPU, by rule: no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST = 256
"""Units of the largest layer that the step kernel supports."""


@dataclass(frozen=True)
class StepTile:
    """Tile of one program of the step kernel, in powers of two.

    Attributes:
        rows: rows of the batch.
        units: units of the layer, with all their gates.
        depth: units of the input, or of h, that are multiplied at a time.
        warps: warps per program.
        stages: blocks of the depth that are fetched at once.
    """

    rows: int
    units: int
    depth: int
    warps: int
    stages: int


# From large to small, as required by the smallest number of programs; measured, as is the exception below, on an H200
# (benchmarks/bench_step_gpu.py --sweep). The blocks in flight fit into the 99 KB of the smallest chips.
_TILES = (
    StepTile(128, 32, 32, 8, 3),
    StepTile(128, 16, 32, 8, 4),
    StepTile(32, 32, 32, 4, 4),
    StepTile(32, 16, 32, 4, 4),
    StepTile(16, 16, 32, 4, 4),
    StepTile(16, 8, 64, 4, 4),
)
_WIDE, _MANY = 128, 4096


def tile_for_step(rows: int, hidden: int, processors: int) -> StepTile:
    """Return the largest tile, at least half used, that leaves few multiprocessors idle, or else the smallest tile.

    Args:
        rows: B.
        hidden: H.
        processors: multiprocessors of the GPU.
    """
    tallest, widest = (max(least, 1 << (size - 1).bit_length()) for least, size in ((16, rows), (8, hidden)))
    fitting = [tile for tile in _TILES if tile.rows <= tallest and tile.units <= widest]
    enough = (tile for tile in fitting if 4 * -(-rows // tile.rows) * -(-hidden // tile.units) >= 3 * processors)
    return next(enough, fitting[-1])


def pays(rows: int, hidden: int, precision: str) -> bool:
    """Return whether one kernel is faster than cuBLAS products in tf32 or bfloat16, followed by the cell.

    Args:
        rows: B.
        hidden: H.
        precision: ``"ieee"`` (accurate to float32), ``"tf32"`` or ``"bf16"``.
    """
    return precision == "ieee" or hidden <= _WIDE or rows < _MANY
