# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, PLR0915
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments. An if on a constant is a statement because only one of its branches is compiled.
"""Kernel of one step of one layer: both products, gates, new states."""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.cuda.parts import operand, product, sigmoid, split, tanh


@triton.jit
def _halves(x, PRECISION: tl.constexpr):
    """Return an operand of a product, and its rounding error in products accurate to float32."""
    if PRECISION == "ieee":
        high, low = split(x.to(tl.float32))
    else:
        high = operand(x, PRECISION)
        low = high
    return high, low


@triton.jit
def _add_product(
    acc, a, a_row, m, kept, w, row, row_in, depth,
    PRECISION: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return ``acc + a @ w[row].T``; rows of ``a`` without ``kept``, and of ``w`` without ``row_in``, count as zeros.

    Such rows aren't read. Products accurate to float32 are three products of split operands.
    """
    k = tl.arange(0, DEPTH)
    a_at = a + m.to(tl.int64)[:, None] * a_row + k[None, :]
    w_at = w + row[None, :] * depth + k[:, None]
    for at in tl.range(0, depth, DEPTH, num_stages=STAGES):
        inside = at + k < depth
        high, low = _halves(tl.load(a_at, mask=kept[:, None] & inside[None, :], other=0.0), PRECISION)
        w_high, w_low = _halves(tl.load(w_at, mask=inside[:, None] & row_in[None, :], other=0.0), PRECISION)
        if PRECISION == "ieee":
            part = tl.dot(low, w_high, input_precision="tf32")
            part = tl.dot(high, w_low, part, input_precision="tf32")
            acc += tl.dot(high, w_high, part, input_precision="tf32")
        else:
            acc = product(high, w_high, acc, PRECISION)
        a_at += DEPTH
        w_at += DEPTH
    return acc


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
    """Write the states after a step, and h again as features, for ROWS rows and UNITS units per program.

    All gates are columns of one product. LSTM: i, f, g, o. GRU: r, z, and the input and hidden parts of n. A row starts
    from zero if ``is_init``, and its states aren't read. ``c`` and ``c_after`` exist for the LSTM only.
    """
    blocks = tl.cdiv(hidden, UNITS)
    m = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) % blocks * UNITS
    row_in = m < rows
    kept = row_in
    if RESETS:
        kept = tl.load(is_init + m, mask=row_in, other=1) == 0
    column = tl.arange(0, 4 * UNITS)
    gate = column // UNITS
    unit = first + column % UNITS
    row = gate * hidden + unit
    of_x = unit < hidden
    of_h = of_x
    if not LSTM:
        row = tl.minimum(gate, 2) * hidden + unit
        of_x = of_x & (gate != 3)
        of_h = of_h & (gate != 2)
    bias = tl.zeros([4 * UNITS], tl.float32)
    if IN_BIAS:
        bias += tl.load(b_ih + row, mask=of_x, other=0.0).to(tl.float32)
    if HIDDEN_BIAS:
        bias += tl.load(b_hh + row, mask=of_h, other=0.0).to(tl.float32)
    gates = tl.broadcast_to(bias[None, :], [ROWS, 4 * UNITS])
    gates = _add_product(gates, x, x_row, m, row_in, w_ih, row, of_x, inputs, PRECISION, DEPTH, STAGES)
    gates = _add_product(gates, h, h_row, m, kept, w_hh, row, of_h, hidden, PRECISION, DEPTH, STAGES)
    even, odd = tl.split(tl.permute(tl.reshape(gates, [ROWS, 2, 2, UNITS]), [0, 3, 1, 2]))
    g0, g2 = tl.split(even)
    g1, g3 = tl.split(odd)

    n = first + tl.arange(0, UNITS)
    wide = m.to(tl.int64)[:, None]
    here = row_in[:, None] & (n < hidden)[None, :]
    before = kept[:, None] & (n < hidden)[None, :]
    if LSTM:
        cell = tl.load(c + wide * c_row + n[None, :], mask=before, other=0.0).to(tl.float32)
        cell = sigmoid(g1) * cell + sigmoid(g0) * tanh(g2)
        tl.store(c_after + wide * after_row + n[None, :], cell.to(c_after.dtype.element_ty), mask=here)
        output = sigmoid(g3) * tanh(cell)
    else:
        state = tl.load(h + wide * h_row + n[None, :], mask=before, other=0.0).to(tl.float32)
        new = tanh(g2 + sigmoid(g0) * g3)
        output = new + sigmoid(g1) * (state - new)
    result = output.to(h_after.dtype.element_ty)
    tl.store(h_after + wide * after_row + n[None, :], result, mask=here)
    if FEATURES:
        tl.store(features + wide * hidden + n[None, :], result, mask=here)
