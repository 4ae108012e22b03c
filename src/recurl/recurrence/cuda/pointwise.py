# pyright: basic, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Distribution of segments over slots, and pointwise kernels over all tokens.

A *slot* is one row of a tile. Slot s of R processes, token by token, the segments that start in [s q, (s + 1) q), with
q = ceil(N / R): a contiguous part of the stream. Nothing is sorted, the host never waits, and the grid is fixed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.cuda.parts import operand, sigmoid, tanh


@triton.jit
def bounds_kernel(starts, bounds, tokens, share, BLOCK: tl.constexpr):
    """Write the begin of slot ``program_id(0)``: the first segment start at or after ``slot * share``, else N."""
    slot = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    base = slot * share
    found = slot * 0 + tokens
    while base < found:
        token = base + lane
        flag = tl.load(starts + token, mask=token < tokens, other=0)
        found = tl.minimum(found, tl.min(tl.where(flag != 0, token, tokens)))
        base += BLOCK
    tl.store(bounds + slot, found)


@triton.jit
def _state_before(stored, earlier, first, inside):
    # The state before a token: the stored one at a segment start, else the state after the previous token.
    kept = tl.load(stored, mask=inside & first, other=0.0).to(tl.float32)
    return tl.where(first, kept, tl.load(earlier, mask=inside & (first == 0), other=0.0).to(tl.float32))


@triton.jit
def previous_kernel(
    stored, stored_row, stored_column, after, starts, before, total, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the state before every token: the stored one at segment starts, else that after the previous token."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    token = place // HIDDEN
    unit = place % HIDDEN
    first = tl.load(starts + token, mask=inside, other=1) != 0
    value = _state_before(stored + token * stored_row + unit * stored_column, after + place - HIDDEN, first, inside)
    tl.store(before + place, value.to(before.dtype.element_ty), mask=inside)


@triton.jit
def turn_kernel(
    values,
    values_row,
    values_column,
    stored,
    stored_row,
    stored_column,
    starts,
    turned,
    tokens,
    columns,
    BEFORE: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write DEPTH tokens of ``values`` ``[tokens, columns]``, transposed and in tf32: ``[WIDTH, DEPTH]`` per program.

    Zeros follow the last token. BEFORE: ``values`` are the states after every token, and those before every token are
    written, as by ``previous_kernel``. SPLIT: the rounding errors follow, ``[2, WIDTH, DEPTH]``.
    """
    token = tl.program_id(0).to(tl.int64) * DEPTH + tl.arange(0, DEPTH)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < columns)[None, :]
    if BEFORE:
        first = (tl.load(starts + token, mask=token < tokens, other=1) != 0)[:, None]
        kept = stored + token[:, None] * stored_row + column[None, :] * stored_column
        earlier = values + (token[:, None] - 1) * values_row + column[None, :] * values_column
        value = _state_before(kept, earlier, first, inside)
    else:
        at = values + token[:, None] * values_row + column[None, :] * values_column
        value = tl.load(at, mask=inside, other=0.0)
    PARTS: tl.constexpr = 2 if SPLIT else 1
    high = operand(value, "tf32")
    place = column[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    to = turned + tl.program_id(0).to(tl.int64) * (PARTS * WIDTH * DEPTH) + place
    tl.store(to, tl.trans(high), mask=(column < WIDTH)[:, None])
    if SPLIT:
        tl.store(to + WIDTH * DEPTH, tl.trans(value - high), mask=(column < WIDTH)[:, None])


@triton.jit
def gates_kernel(
    input_gates,
    hidden_gates,
    b_hn,
    gates,
    total,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LSTM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gates of all tokens at once, as the forward kernels keep them.

    The input product is in the order of its :class:`GateLayout`, the hidden one ``[N, G * H]`` in that of torch.nn.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    token = place // HIDDEN
    unit = place % HIDDEN
    GATES: tl.constexpr = 4 if LSTM else 3
    MIXED: tl.constexpr = GATES if LSTM else 2
    STEP: tl.constexpr = MIXED if INTERLEAVED else 1
    GATE: tl.constexpr = 1 if INTERLEAVED else WIDTH
    row = input_gates + token * (GATES * WIDTH)
    x_at = row + unit * STEP + (0 if LSTM else WIDTH)
    h_at = hidden_gates + token * (GATES * HIDDEN) + unit
    x0 = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    x1 = tl.load(x_at + GATE, mask=inside, other=0.0).to(tl.float32)
    h0 = tl.load(h_at, mask=inside, other=0.0).to(tl.float32)
    h1 = tl.load(h_at + HIDDEN, mask=inside, other=0.0).to(tl.float32)
    h2 = tl.load(h_at + 2 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
    g0 = sigmoid(x0 + h0)
    g1 = sigmoid(x1 + h1)
    if LSTM:
        x2 = tl.load(x_at + 2 * GATE, mask=inside, other=0.0).to(tl.float32)
        x3 = tl.load(x_at + 3 * GATE, mask=inside, other=0.0).to(tl.float32)
        h3 = tl.load(h_at + 3 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
        g2 = tanh(x2 + h2)
        g3 = sigmoid(x3 + h3)
    else:
        x2 = tl.load(row + unit, mask=inside, other=0.0).to(tl.float32)
        g3 = h2 + tl.load(b_hn + unit, mask=inside, other=0.0).to(tl.float32)
        g2 = tanh(x2 + g0 * g3)
        if gates.dtype.element_ty == tl.float16:  # the only kept value without a bound
            g3 = tl.minimum(tl.maximum(g3, -65504.0), 65504.0)
    KEPT_STEP: tl.constexpr = 4 if INTERLEAVED else 1
    to = gates + token * (4 * WIDTH) + unit * KEPT_STEP
    tl.store(to, g0.to(gates.dtype.element_ty), mask=inside)
    tl.store(to + GATE, g1.to(gates.dtype.element_ty), mask=inside)
    tl.store(to + 2 * GATE, g2.to(gates.dtype.element_ty), mask=inside)
    tl.store(to + 3 * GATE, g3.to(gates.dtype.element_ty), mask=inside)


@triton.jit
def sums_kernel(values, sums, tokens, share, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum ``[N, columns]`` over the ``share`` tokens of each program: ``sums[program_id(0)]``.

    In float32, or in float64 if the values are float64, and always in the same order.
    """
    ACC: tl.constexpr = tl.float64 if values.dtype.element_ty == tl.float64 else tl.float32
    begin = tl.program_id(0).to(tl.int64) * share
    end = tl.minimum(begin + share, tokens)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full([ROWS, COLUMNS], 0.0, ACC)
    while begin < end:
        token = begin + tl.arange(0, ROWS)
        inside = (token < end)[:, None] & (column < columns)[None, :]
        total += tl.load(values + token[:, None] * columns + column[None, :], mask=inside, other=0.0).to(ACC)
        begin += ROWS
    at = sums + tl.program_id(0).to(tl.int64) * columns + column
    tl.store(at, tl.sum(total, 0).to(sums.dtype.element_ty), mask=column < columns)
