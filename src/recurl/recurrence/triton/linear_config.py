"""How a linear recurrence is cut into chunks on a GPU, by table: no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """What one program of a linear recurrence's kernel, four warps, works on; all but the last are powers of two.

    Attributes:
        steps: tokens that a thread walks, 4 to 32.
        rows: such pieces of a chunk.
        columns: channels of a program.
        registers: per thread at most, or None for as many as the compiler likes.
        group: chunks that compose what they do before they wait for the chunks before them.
    """

    steps: int
    rows: int
    columns: int
    registers: int | None = None
    group: int = 16


def chunk_for(direction: str, width: int, dtype: torch.dtype, constant: bool) -> Chunk:
    """Return how to cut a stream of ``width`` channels.

    Measured with float32 on an H200 (``benchmarks/bench_linear_recurrence.py --sweep``). Of wider numbers, which take
    as many more registers, a program has fewer channels.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        width: D.
        dtype: of the numbers.
        constant: whether a is the same at every token.
    """
    forward = direction == "forward"
    keeps_three = not forward and not constant  # numbers of a token; others keep two at most
    columns = (64 if keeps_three else 128) // max(4, dtype.itemsize)
    size = 16 * columns
    columns = min(columns, max(4, 1 << (width - 1).bit_length()))
    steps = 8 if forward and not constant else 16
    return Chunk(steps, size // columns, columns, None if keeps_three else 128)
