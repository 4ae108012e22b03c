"""Large matrix products that are faster than ATen's: those accurate to float32, and those over all tokens in tf32."""

from __future__ import annotations

import itertools
from functools import lru_cache

import torch
from torch import Tensor

from recurl.recurrence.cuda import pointwise
from recurl.recurrence.cuda.launch import processors_of
from recurl.recurrence.cuda.prepared import PreparedLaunch, prepared
from recurl.recurrence.cuda.products.kernel import large_product_kernel
from recurl.sequences.index import Boundaries

_ROWS, _DEPTH, _STAGES, _WARPS = 128, 32, 4, 8
# Columns of a tile, and the cycles per term of its sums: in tf32, and accurate to float32.
_TILES = {False: {128: 20, 256: 32}, True: {128: 58}}
_TRANSPOSED_COLUMNS = 128  # columns per program of the transposing kernel
_BYTES_A_CYCLE = 2000  # memory bandwidth of the GPU
_LEAST_SHARE = 1024  # fewest terms of a sum that are worth a separate program
_ALIGNED = 16  # rows are padded to a multiple of this many numbers, so that they are copied 16 bytes at a time


def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``a @ b + bias`` of float32 tensors, accurate to float32 by three tensor-core products."""
    rows, depth = a.shape
    if depth % _ALIGNED or a.stride(0) % _ALIGNED or a.stride(1) != 1 or a.data_ptr() % _ALIGNED:
        aligned = a.new_zeros(rows, -(-depth // _ALIGNED) * _ALIGNED)
        aligned[:, :depth] = a
        a = aligned
    return _multiply(a, b, None, bias, transposed=False, exact=True)[0]


def over_tokens(a: Tensor, values: Tensor, before: tuple[Tensor, Boundaries] | None, exact: bool) -> tuple[Tensor, ...]:
    """Return ``a.t() @ values`` for ``[N, rows]`` and ``[N, columns]``, and the sums of ``a`` over shares of N.

    With ``before`` (stored states and boundaries), ``values`` are the states after every token, and those before every
    token are multiplied, as returned by ``launch.states_before``. The product is in tf32 or, if ``exact``, accurate to
    float32. The columns of ``a`` are contiguous; their number and the row stride are multiples of 16.

    Returns ``[rows, columns]`` and ``[shares, rows]``.
    """
    return _multiply(a, values, before, None, transposed=True, exact=exact)


def _multiply(
    a: Tensor,
    b: Tensor,
    before: tuple[Tensor, Boundaries] | None,
    bias: Tensor | None,
    transposed: bool,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``a @ b + bias``, and the column sums of a transposed ``a``. The order of all sums is fixed."""
    (rows, depth), columns = a.t().shape if transposed else a.shape, b.shape[1]
    shares, tile = cut_for(depth, rows, columns, processors_of(a.device), exact)
    across = -(-columns // tile)
    c = torch.empty(shares, rows, columns, dtype=torch.float32, device=a.device)
    sums = torch.empty(shares if transposed else 0, rows, dtype=torch.float32, device=a.device)
    multiply = _product_launch(-(-rows // _ROWS), across, shares, tile, transposed, exact, bias is not None)
    multiply(
        *(a, transpose_in_blocks(b, before, across * tile, exact), a if bias is None else bias, c, sums),
        *(depth, a.stride(0), across * tile, rows, columns, -(-depth // (shares * _DEPTH)) * _DEPTH),
    )
    return c[0] if shares == 1 else c.sum(0), sums


def transpose_in_blocks(values: Tensor, before: tuple[Tensor, Boundaries] | None, width: int, split: bool) -> Tensor:
    """Return the kernel's operand b, ``[blocks, parts, width, terms of a block]`` in tf32, padded by zeros."""
    tokens, columns = values.shape
    blocks = -(-tokens // _DEPTH)
    stored, starts = (values, values) if before is None else (before[0], before[1].flags)
    found = torch.empty(blocks, 2 if split else 1, width, _DEPTH, dtype=torch.float32, device=values.device)
    turn = _transpose_launch(blocks, width, before is not None, split)
    turn(values, *values.stride(), stored, *stored.stride(), starts, found, tokens, columns)
    return found


@lru_cache(maxsize=256)
def _transpose_launch(blocks: int, width: int, before: bool, split: bool) -> PreparedLaunch:
    constants = {"BEFORE": before, "SPLIT": split, "WIDTH": width, "DEPTH": _DEPTH, "COLUMNS": _TRANSPOSED_COLUMNS}
    return prepared(pointwise.turn_kernel, blocks, -(-width // _TRANSPOSED_COLUMNS), **constants, num_warps=4)


@lru_cache(maxsize=256)
def _product_launch(
    down: int, across: int, shares: int, tile: int, transposed: bool, exact: bool, biased: bool
) -> PreparedLaunch:
    constants = constants_for(tile, transposed, exact, biased)
    return prepared(large_product_kernel, down, across, shares, **constants, num_warps=_WARPS)


def constants_for(tile: int, transposed: bool, exact: bool, biased: bool) -> dict[str, int]:
    """Return compile-time arguments of the kernel for tiles of ``tile`` columns."""
    fixed = {"ROWS": _ROWS, "DEPTH": _DEPTH, "STAGES": _STAGES, "WARPS": _WARPS}
    return {**fixed, "COLUMNS": tile, "TURNED": transposed, "EXACT": exact, "BIAS": biased}


@lru_cache(maxsize=256)
def cut_for(depth: int, rows: int, columns: int, processors: int, exact: bool) -> tuple[int, int]:
    """Return the shares of a sum's terms and the columns of a tile that a product is divided into.

    They minimize the estimated cycles: rounds of programs, and the sum over shares, which goes through memory.
    """
    tiles = _TILES[exact]

    def cycles(cut: tuple[int, int]) -> float:
        shares, tile = cut
        rounds = -(-shares * -(-rows // _ROWS) * -(-columns // tile) // processors)
        return rounds * depth / shares * tiles[tile] + shares * rows * columns * 8 / _BYTES_A_CYCLE

    most = min(max(1, depth // _LEAST_SHARE), processors)
    return min(itertools.product(range(1, most + 1), tiles), key=cycles)
