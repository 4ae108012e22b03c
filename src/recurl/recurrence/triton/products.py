"""Large matrix products that are quicker than ATen's: those accurate to float32, and in tf32 those over all tokens."""

from __future__ import annotations

import itertools
from functools import lru_cache

import torch
from torch import Tensor

from recurl.recurrence.boundaries import Boundaries
from recurl.recurrence.triton import accurate, walk
from recurl.recurrence.triton.launch import flags_of, processors_of
from recurl.recurrence.triton.prepared import Launch, prepared
from recurl.recurrence.triton.token_product import token_product_kernel

_ROWS, _COLUMNS, _DEPTH, _WARPS, _STAGES = 128, 128, 32, 8, 3
_ACROSS = 8  # tiles of columns that stand beside each other in time
_LEAST_SHARE = 1024  # of the depth, that is worth a program of its own
_LEAST_WORK = 2**31  # multiplications below which ATen's products are as quick


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b + bias`` of float32 tensors, accurate to float32."""
    (rows, depth), columns = a.shape, b.shape[1]
    if rows * columns * depth < _LEAST_WORK:
        return a @ b if bias is None else torch.addmm(bias, a, b)
    return split_product(a, b, bias)


def split_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same by three products of tensor cores, whatever the size. The order of all sums is fixed."""
    (rows, depth), columns = a.shape, b.shape[1]
    if b.stride(0) != 1:  # tensor cores read the right operand by columns
        b = b.t().contiguous().t()
    tiles = -(-rows // _ROWS) * -(-columns // _COLUMNS)
    parts = 1 if bias is not None else max(1, min(processors_of(a.device) // tiles, depth // _LEAST_SHARE))
    share = -(-depth // (parts * _DEPTH)) * _DEPTH
    c = torch.empty(parts, rows, columns, dtype=torch.float32, device=a.device)
    multiply = prepared(
        *(accurate.product_kernel, tiles, parts),
        BIAS=bias is not None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        ACROSS=_ACROSS,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    multiply(a, *a.stride(), b, *b.stride(), a if bias is None else bias, c, rows, columns, depth, share)
    return c[0] if parts == 1 else c.sum(0)


_TILE_ROWS, _TILE_DEPTH, _TILE_STAGES = 128, 32, 4
_TILE_COLUMNS = {128: 20, 256: 32}  # and how many cycles a token takes
_TURNED = 128  # columns, of a program that turns
_BYTES_A_CYCLE = 2000  # of the GPU's memory


def over_tokens(a: Tensor, values: Tensor, before: tuple[Tensor, Boundaries] | None) -> tuple[Tensor, Tensor]:
    """``a.t() @ values`` in tf32, of ``[N, rows]`` and ``[N, columns]``, and the sums of ``a`` over shares of N.

    With ``before``, which are stored states and boundaries, instead of the states after every token, which values are,
    those before it, as ``launch.states_before`` finds them. The order of all sums is fixed.

    Returns ``[rows, columns]`` and ``[shares, rows]``.
    """
    (tokens, rows), columns = a.shape, values.shape[1]
    shares, tile = cut_for(tokens, rows, columns, processors_of(a.device))
    across = -(-columns // tile)
    b = turned(values, before, across * tile)
    c = torch.empty(shares, rows, columns, dtype=torch.float32, device=a.device)
    sums = torch.empty(shares, rows, dtype=torch.float32, device=a.device)
    multiply = _multiplying(-(-rows // _TILE_ROWS), across, shares, tile)
    share = -(-tokens // (shares * _TILE_DEPTH)) * _TILE_DEPTH
    multiply(a, b, c, sums, tokens, a.stride(0), across * tile, rows, columns, share)
    return c[0] if shares == 1 else c.sum(0), sums


def turned(values: Tensor, before: tuple[Tensor, Boundaries] | None, width: int) -> Tensor:
    """What :func:`over_tokens` multiplies by: ``[blocks, width, tokens of a block]``, in tf32, padded by zeros."""
    tokens, columns = values.shape
    blocks = -(-tokens // _TILE_DEPTH)
    stored, starts = (values, values) if before is None else (before[0], flags_of(before[1]))
    found = torch.empty(blocks, width, _TILE_DEPTH, dtype=torch.float32, device=values.device)
    turn = _turning(blocks, width, before is not None)
    turn(values, *values.stride(), stored, *stored.stride(), starts, found, tokens, columns)
    return found


@lru_cache(maxsize=256)
def _turning(blocks: int, width: int, before: bool) -> Launch:
    constants = {"BEFORE": before, "WIDTH": width, "DEPTH": _TILE_DEPTH, "COLUMNS": _TURNED}
    return prepared(walk.turn_kernel, blocks, -(-width // _TURNED), **constants, num_warps=4)


@lru_cache(maxsize=256)
def _multiplying(down: int, across: int, shares: int, tile: int) -> Launch:
    return prepared(token_product_kernel, down, across, shares, **constants_for(tile), num_warps=_WARPS)


def constants_for(tile: int) -> dict[str, int]:
    """Of the kernel that multiplies over tokens, in tiles of so many columns."""
    fixed = {"ROWS": _TILE_ROWS, "DEPTH": _TILE_DEPTH, "STAGES": _TILE_STAGES, "WARPS": _WARPS}
    return {**fixed, "COLUMNS": tile}


@lru_cache(maxsize=256)
def cut_for(tokens: int, rows: int, columns: int, processors: int) -> tuple[int, int]:
    """Into how many shares of the tokens, and into tiles of how many columns, a product over tokens is cut.

    That of the least cycles: rounds of programs, and the sum over shares, which goes through memory.
    """

    def cycles(cut: tuple[int, int]) -> float:
        shares, tile = cut
        rounds = -(-shares * -(-rows // _TILE_ROWS) * -(-columns // tile) // processors)
        return rounds * tokens / shares * _TILE_COLUMNS[tile] + shares * rows * columns * 8 / _BYTES_A_CYCLE

    most = min(max(1, tokens // _LEAST_SHARE), processors)
    return min(itertools.product(range(1, most + 1), _TILE_COLUMNS), key=cycles)
