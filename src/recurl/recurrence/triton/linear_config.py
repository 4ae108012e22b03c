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


def chunk_for(direction: str, width: int, dtype: torch.dtype) -> Chunk:
    """Return how to cut a stream of ``width`` channels.

    A row of a chunk is 64 bytes wide, in numbers of at least four bytes: so each of 128 threads has two registers of a
    number of a token, and publishes words of its own, without exchanging them first. What a pass keeps of a piece fits
    into its registers, as many programs as possible share a multiprocessor's 65,536: five of forward passes over 8
    tokens, four over 16 of narrow numbers, three of backward passes, which keep more. The best of a sweep on an H200
    (``bench_linear_recurrence.py --sweep``) but for forward passes of complex numbers with constant a.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        width: D.
        dtype: of the numbers.
    """
    columns = 64 // max(4, dtype.itemsize)
    size = 16 * columns
    columns = min(columns, max(4, 1 << (width - 1).bit_length()))
    steps, registers = (16, 168) if direction == "backward" else (16, 128) if dtype.itemsize < 4 else (8, 96)
    return Chunk(steps, size // columns, columns, registers)
