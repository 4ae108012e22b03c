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
        keep: whether a forward pass keeps its chunk in registers between its walks, or reads it again.
        group: chunks that compose what they do before they wait for the chunks before them.
    """

    steps: int
    rows: int
    columns: int
    registers: int | None = None
    keep: bool = True
    group: int = 16


def chunk_for(direction: str, width: int, dtype: torch.dtype) -> Chunk:
    """Return how to cut a stream of ``width`` channels.

    A row of a chunk is 64 bytes wide, in numbers of at least four bytes: so each of 128 threads has two registers of a
    number of a token, and publishes words of its own, without exchanging them first. What a pass keeps of a piece fits
    into its registers, as many programs as possible share a multiprocessor's 65,536: eight of forward passes, which
    walk 8 tokens and keep none of them; four over 16 narrow numbers; three of backward passes, which read more. The
    best of a sweep on an H200 (``bench_linear_recurrence.py --sweep``).

    Args:
        direction: ``"forward"`` or ``"backward"``.
        width: D.
        dtype: of the numbers.
    """
    columns = 64 // max(4, dtype.itemsize)
    size = 16 * columns
    columns = min(columns, max(4, 1 << (width - 1).bit_length()))
    if direction == "forward" and dtype.itemsize >= 4:
        return Chunk(8, size // columns, columns, registers=64, keep=False)
    return Chunk(16, size // columns, columns, registers=168 if direction == "backward" else 128)
