"""Large matrix products accurate to float32: three products of tensor cores instead of ATen's one without them."""

from __future__ import annotations

import torch
from torch import Tensor

from recurl.recurrence.triton import accurate
from recurl.recurrence.triton.launch import processors_of
from recurl.recurrence.triton.prepared import prepared

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
