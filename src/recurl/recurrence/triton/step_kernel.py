# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913
# Kernel bodies are a language of their own: Triton's types are known to its compiler alone, and a body is one function,
# however long, with all its arguments; an if on a constant compiles one branch, in lines of its own.
"""One step of one layer: both products, gates, new states."""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.triton.accurate import split
from recurl.recurrence.triton.parts import operand, product, sigmoid, tanh


@triton.jit
def _halves(x, PRECISION: tl.constexpr):
    """What enters a product, and for products accurate to float32 the rest of it."""
    if PRECISION == "ieee":
        high, low = split(x.to(tl.float32))
    else:
        high = operand(x, PRECISION)
        low = high
    return high, low


@triton.jit
def _add_product(acc, a, a_low, w_at, mask, PRECISION: tl.constexpr):
    """``acc + a @ w``; as in :func:`recurl.recurrence.triton.accurate.product_kernel` where it is accurate to float32.

    Tensor cores cut their sums off, hence there the sum of each piece of the depth is taken apart.
    """
    w, w_low = _halves(tl.load(w_at, mask=mask, other=0.0), PRECISION)
    if PRECISION == "ieee":
        part = tl.dot(a_low, w, input_precision="tf32")
        part = tl.dot(a, w_low, part, input_precision="tf32")
        acc += tl.dot(a, w, part, input_precision="tf32")
    else:
        acc = product(a, w, acc, PRECISION)
    return acc


@triton.jit
def _add_products(
    g0, g1, g2, g3,
    a, a_row, m, kept, w, n, unit_in, hidden, depth,
    FOUR: tl.constexpr, PRECISION: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add ``a @ w.T`` to three gates or four; rows of ``a`` that aren't kept count as zeros, and aren't read."""
    k = tl.arange(0, DEPTH)
    a_at = a + m.to(tl.int64)[:, None] * a_row + k[None, :]
    w_at = w + n[None, :] * depth + k[:, None]
    gate = hidden * depth
    for at in tl.range(0, depth, DEPTH, num_stages=STAGES):
        inside = at + k < depth
        read = inside[:, None] & unit_in[None, :]
        operands, low = _halves(tl.load(a_at, mask=kept[:, None] & inside[None, :], other=0.0), PRECISION)
        g0 = _add_product(g0, operands, low, w_at, read, PRECISION)
        g1 = _add_product(g1, operands, low, w_at + gate, read, PRECISION)
        g2 = _add_product(g2, operands, low, w_at + 2 * gate, read, PRECISION)
        if FOUR:
            g3 = _add_product(g3, operands, low, w_at + 3 * gate, read, PRECISION)
        a_at += DEPTH
        w_at += DEPTH
    return g0, g1, g2, g3


@triton.jit
def _bias(b_ih, b_hh, at, mask, IN: tl.constexpr, HIDDEN: tl.constexpr, LIKE: tl.constexpr):
    """The sum of those biases that are there, ``[1, UNITS]``."""
    bias = tl.zeros([LIKE], tl.float32)
    if IN:
        bias += tl.load(b_ih + at, mask=mask, other=0.0).to(tl.float32)
    if HIDDEN:
        bias += tl.load(b_hh + at, mask=mask, other=0.0).to(tl.float32)
    return bias[None, :]


@triton.jit(do_not_specialize=["rows"])
def step_kernel(
    x,
    x_row,
    h,
    h_row,
    c,
    c_row,
    w_ih,
    w_hh,
    b_ih,
    b_hh,
    is_init,
    features,
    h_after,
    c_after,
    after_row,
    rows,
    inputs,
    hidden,
    LSTM: tl.constexpr,
    IN_BIAS: tl.constexpr,
    HIDDEN_BIAS: tl.constexpr,
    RESETS: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the states after a step, and h a second time as features, of ROWS rows and UNITS units a program.

    A row starts from zero where ``is_init``, and its states aren't read. ``c`` and ``c_after`` are the LSTM's.
    """
    blocks = tl.cdiv(hidden, UNITS)
    m = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) % blocks * UNITS + tl.arange(0, UNITS)
    row_in = m < rows
    unit_in = n < hidden
    kept = row_in
    if RESETS:
        kept = tl.load(is_init + m, mask=row_in, other=1) == 0
    here = row_in[:, None] & unit_in[None, :]
    before = kept[:, None] & unit_in[None, :]
    wide = m.to(tl.int64)[:, None]
    zero = tl.zeros([ROWS, UNITS], tl.float32)
    g0, g1, g2, g3 = _add_products(
        zero, zero, zero, zero, x, x_row, m, row_in, w_ih, n, unit_in, hidden, inputs,
        LSTM, PRECISION, DEPTH, STAGES,
    )  # fmt: skip
    if LSTM:
        g0, g1, g2, g3 = _add_products(
            g0, g1, g2, g3, h, h_row, m, kept, w_hh, n, unit_in, hidden, hidden,
            True, PRECISION, DEPTH, STAGES,
        )  # fmt: skip
        i = sigmoid(g0 + _bias(b_ih, b_hh, n, unit_in, IN_BIAS, HIDDEN_BIAS, UNITS))
        f = sigmoid(g1 + _bias(b_ih, b_hh, n + hidden, unit_in, IN_BIAS, HIDDEN_BIAS, UNITS))
        g = tanh(g2 + _bias(b_ih, b_hh, n + 2 * hidden, unit_in, IN_BIAS, HIDDEN_BIAS, UNITS))
        o = sigmoid(g3 + _bias(b_ih, b_hh, n + 3 * hidden, unit_in, IN_BIAS, HIDDEN_BIAS, UNITS))
        cell = f * tl.load(c + wide * c_row + n[None, :], mask=before, other=0.0).to(tl.float32) + i * g
        tl.store(c_after + wide * after_row + n[None, :], cell.to(c_after.dtype.element_ty), mask=here)
        output = o * tanh(cell)
    else:
        g0, g1, g3, _ = _add_products(
            g0, g1, g3, g3, h, h_row, m, kept, w_hh, n, unit_in, hidden, hidden,
            False, PRECISION, DEPTH, STAGES,
        )  # fmt: skip
        r = sigmoid(g0 + _bias(b_ih, b_hh, n, unit_in, IN_BIAS, HIDDEN_BIAS, UNITS))
        z = sigmoid(g1 + _bias(b_ih, b_hh, n + hidden, unit_in, IN_BIAS, HIDDEN_BIAS, UNITS))
        from_h = g3 + _bias(b_hh, b_hh, n + 2 * hidden, unit_in, False, HIDDEN_BIAS, UNITS)
        from_x = g2 + _bias(b_ih, b_ih, n + 2 * hidden, unit_in, IN_BIAS, False, UNITS)
        new = tanh(from_x + r * from_h)
        state = tl.load(h + wide * h_row + n[None, :], mask=before, other=0.0).to(tl.float32)
        output = new + z * (state - new)
    result = output.to(h_after.dtype.element_ty)
    tl.store(h_after + wide * after_row + n[None, :], result, mask=here)
    if FEATURES:
        tl.store(features + wide * hidden + n[None, :], result, mask=here)
