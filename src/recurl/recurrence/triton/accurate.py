# pyright: basic, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, PLR0913
# Kernel bodies are a language of their own: Triton's types are known to its compiler alone, and a body is one function,
# however long, with all its arguments.
"""Matrix products accurate to float32 on tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split(x):
    """Return x rounded to as few bits as tensor cores read, and the rest, which keeps a NaN that rounding may lose."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def product_kernel(
    a,
    a_row,
    a_column,
    b,
    b_row,
    b_column,
    bias,
    c,
    rows,
    columns,
    depth,
    share,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Write ``c[program_id(1)] = a @ b + bias`` over a share of the depth; a ``[rows, depth]``, b ``[depth, columns]``.

    Operands are split into two parts that tensor cores multiply without rounding; of the four products the least is
    left out. Tensor cores cut their sums off, so that of each DEPTH is taken apart and added by ordinary addition.
    """
    down = tl.cdiv(rows, ROWS)
    across = tl.cdiv(columns, COLUMNS)
    # Neighbouring programs share operands: ACROSS tiles of columns for each tile of rows.
    stripe = tl.program_id(0) // (down * ACROSS)
    width = tl.minimum(across - stripe * ACROSS, ACROSS)
    inside_stripe = tl.program_id(0) % (down * ACROSS)
    m = (inside_stripe // width).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = (stripe * ACROSS + inside_stripe % width).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1).to(tl.int64) * share
    end = tl.minimum(begin + share, depth)
    k = tl.arange(0, DEPTH)
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    if BIAS:
        total += tl.load(bias + n, mask=n < columns, other=0.0)[None, :]
    a_at = a + m[:, None] * a_row + (begin + k)[None, :] * a_column
    b_at = b + (begin + k)[:, None] * b_row + n[None, :] * b_column
    a_in = (m < rows)[:, None]
    b_in = (n < columns)[None, :]
    for at in range(begin, end, DEPTH):
        inside = at + k < end
        a_high, a_low = split(tl.load(a_at, mask=a_in & inside[None, :], other=0.0))
        b_high, b_low = split(tl.load(b_at, mask=inside[:, None] & b_in, other=0.0))
        part = tl.dot(a_low, b_high, input_precision="tf32")
        part = tl.dot(a_high, b_low, part, input_precision="tf32")
        total += tl.dot(a_high, b_high, part, input_precision="tf32")
        a_at += DEPTH * a_column
        b_at += DEPTH * b_row
    to = c + (tl.program_id(1).to(tl.int64) * rows + m)[:, None] * columns + n[None, :]
    tl.store(to, total, mask=a_in & b_in)
