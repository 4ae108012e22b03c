"""Tiles of windowed attention on a GPU, by rule: no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiles:
    """Work of one program of the attention kernels; all are powers of two, and all but the last two at least 16.

    Attributes:
        queries: tokens whose queries a program holds, or processes at once.
        keys: tokens whose keys a program holds, or processes at once.
        readers: tokens that read stored windows, per program.
        stored: stored inputs that are processed at once.
        warps: warps of a program.
        stages: tiles that are under way from memory at once.
    """

    queries: int
    keys: int
    readers: int
    stored: int
    warps: int = 4
    stages: int = 2


def tiles_for(direction: str, head_size: int, width: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles.

    A program's sums take at most half of the registers of a multiprocessor. Tiles have 64 tokens: with larger ones more
    of the keys they cover lie outside the window.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        head_size: D.
        width: E.
        dtype: dtype of the numbers.
    """
    large = padded(head_size) * max(dtype.itemsize, 2) > 256  # bytes of a row
    tokens = 32 if large or (direction == "backward" and dtype.itemsize > 2) else 64
    numbers = 32768 // max(dtype.itemsize, 2) // (1 if direction == "forward" else 2)
    readers = max(16, min(64, numbers // padded(max(1, width - 1))))
    return Tiles(tokens, tokens, readers, 16 if width > 513 else 32, 8 if padded(head_size) > 128 else 4)


def padded(size: int) -> int:
    """Return the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
