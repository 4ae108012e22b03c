"""Tiles of windowed attention on a GPU, by rule: no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recurl.recurrence.cuda.hardware import ALL_REGISTERS


@dataclass(frozen=True)
class Tiles:
    """Work of one program of the attention kernels, in powers of two; tokens and stored inputs are at least 16.

    With more than 32 rows and 4 warps, Triton would multiply matrices by asynchronous instructions of Hopper (wgmma)
    with operands in registers, which ptxas before CUDA 13.3 lets be overwritten while they are read (triton-lang/triton
    pull request 11781).

    Attributes:
        held: tokens whose queries a program holds, or whose keys, for their gradients.
        walked: tokens whose keys, or queries, it processes at once.
        warps: warps of such a program.
        stages: tiles that are under way from memory at once.
        readers: tokens that read stored windows, per program.
        stored: stored inputs that are processed at once.
        reading_warps: warps of a program that reads stored windows.
        keys_stages: ``stages`` of the gradients of keys.
        keys_registers: registers of a thread of these at most; None for as many as the compiler chooses.
        reading_registers: registers of a thread that reads stored windows, likewise.
    """

    held: int
    walked: int
    warps: int
    stages: int
    readers: int
    stored: int
    reading_warps: int
    keys_stages: int = 2
    keys_registers: int | None = None
    reading_registers: int | None = None


def tiles_for(direction: str, head_size: int, width: int, dtype: torch.dtype, precision: str) -> Tiles:
    """Return the tiles: in bfloat16 the fastest of a sweep on an H200 (heads of 64, 128 stored inputs of 257).

    Those in tf32 are within 3 % of the fastest.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        head_size: D.
        width: E.
        dtype: dtype of the numbers.
        precision: of float32 products. All but ``"tf32"`` need operands of twice the size.
    """
    forward, narrow, wide = direction == "forward", padded(head_size) <= 64, padded(max(1, width - 1))
    if dtype.itemsize <= 2:
        warps, stages = ((1, 1) if forward else (2, 3)) if narrow else (4, 2)
        readers = 32 if wide <= (512 if forward else 256) else 16
        return Tiles(32, 32, warps, stages, readers, 32, 4, 2, 168 if narrow else None)
    if precision == "tf32":
        return Tiles(32, 32, 2 if narrow else 4, 2, 32, 16, 4)
    readers, stored = 32 if wide <= (128 if forward else 64) else 16, 32 if wide <= 256 else 16
    return Tiles(32, 32, 4, 2, readers, stored, 8, 2, None, ALL_REGISTERS)


def aligned(size: int) -> int:
    """Return the size of rows with at least as many numbers, all of which begin at a multiple of 16 bytes."""
    return -(-size // 8) * 8


def padded(size: int) -> int:
    """Return the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
