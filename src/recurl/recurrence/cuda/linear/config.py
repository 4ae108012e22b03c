"""Chunks of a linear recurrence on a GPU, by rule: no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """Work of one program (four warps) of the linear recurrence kernels; all but the last are powers of two.

    Attributes:
        steps: tokens per piece, 4 to 16; a thread processes a piece.
        rows: pieces of a chunk.
        columns: channels of a program.
        registers: most registers per thread, or None to let the compiler choose.
        group: chunks that are composed with each other before they wait for the chunks before them.
    """

    steps: int
    rows: int
    columns: int
    registers: int | None = None
    group: int = 16


def chunk_for(direction: str, width: int, dtype: torch.dtype) -> Chunk:
    """Return the chunks for a stream of ``width`` channels.

    A row of a chunk is 64 bytes wide, counting numbers as at least four bytes. So each of 128 threads has two registers
    per number of a token, and publishes its own words without exchanging them first. The values of a piece fit into a
    thread's registers, while as many programs as possible share the 65,536 of a multiprocessor: four of forward passes,
    three of backward passes, which read more. These are the best of sweeps on an H200 and an H100
    (``bench_linear_recurrence.py --sweep``).

    Args:
        direction: ``"forward"`` or ``"backward"``.
        width: D.
        dtype: dtype of the numbers.
    """
    columns = 64 // max(4, dtype.itemsize)
    size = 16 * columns
    columns = min(columns, max(4, 1 << (width - 1).bit_length()))
    steps = 16 if dtype.itemsize < 16 else 8  # a complex128 takes four registers
    return Chunk(steps, size // columns, columns, registers=168 if direction == "backward" else 128)
