"""How a linear recurrence is cut into chunks on a GPU, by table: no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """What one program of a linear recurrence's kernel keeps in registers; all but the last are powers of two.

    Attributes:
        steps: tokens that a thread walks, 4 to 32.
        rows: such pieces of a chunk.
        columns: channels of a program.
        group: chunks that compose what they do before they wait for the chunks before them.
        warps: per program.
        batch: tokens of a piece that are fetched together; None: all of them, to be kept in registers between the two
            walks, else they are read again.
        registers: per thread at most, or None for as many as the compiler likes.
    """

    steps: int
    rows: int
    columns: int
    group: int
    warps: int
    batch: int | None = None
    registers: int | None = None


def chunk_for(direction: str, width: int, dtype: torch.dtype, constant: bool) -> Chunk:
    """Return how to cut a stream of ``width`` channels.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        width: D.
        dtype: of the numbers.
        constant: whether a is the same at every token.
    """
    columns = min(16 if dtype.is_complex else 32, max(4, 1 << (width - 1).bit_length()))
    steps = 16 if direction == "forward" else 8
    if dtype.is_complex or (dtype == torch.float64 and not constant):
        steps //= 2
    return Chunk(steps, 512 // columns, columns, 16, 4)
