"""How a linear recurrence is cut into chunks on a GPU, by rule: no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """What one program of a linear recurrence's kernel, four warps, works on; all but the last are powers of two.

    Attributes:
        steps: tokens that a thread walks, 4 to 16.
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

    A piece is 16 tokens, a row of a chunk 64 bytes wide, in numbers of at least four bytes: so each of 128 threads has
    two registers of a number of a token, and publishes words of its own, without exchanging them first. Of a token two
    numbers at most are kept, in 64 registers, so that four programs share a multiprocessor's 65,536 registers; where
    three are kept, in 96 registers, three programs do.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        width: D.
        dtype: of the numbers.
        constant: whether a is the same at every token.
    """
    columns = 64 // max(4, dtype.itemsize)
    size = 16 * columns
    columns = min(columns, max(4, 1 << (width - 1).bit_length()))
    keeps_three = direction == "backward" and not constant
    return Chunk(16, size // columns, columns, 168 if keeps_three else 128)
