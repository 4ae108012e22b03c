# pyright: basic, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202, C901, PLR0912, PLR0913, PLR0915
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Forward recurrence in plain Triton: any hidden size, any sm_80 or newer, and the interpreter.

A program computes UNITS hidden units of 16 slots, step by step. It keeps its recurrent weights in registers where
they fit (RESIDENT), else it loads them at every step; the states are in global memory. What it computes is
:func:`recurl.recurrence.cuda.definition.forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.cuda.parts import meet, operand, product, sigmoid, tanh


@triton.jit
def _weights(w_hh, row, column, k, u, inside, gate: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr):
    # W[gate][u, k] as the right operand [k, u].
    at = w_hh + k[:, None] * column + (gate * HIDDEN + u)[None, :] * row
    return operand(tl.load(at, mask=inside, other=0.0), PRECISION)


@triton.jit
def forward_kernel(
    input_gates,
    b_hn,
    w_hh,
    w_row,
    w_column,
    stored_h,
    h_row,
    h_column,
    stored_c,
    c_row,
    c_column,
    starts,
    bounds,
    after_h,
    after_c,
    gates,
    flags,
    step_begin,
    step_end,
    HIDDEN: tl.constexpr,
    LSTM: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RESIDENT: tl.constexpr,
):
    """Run ROWS slots for up to ``step_end - step_begin`` steps; a group of MEMBERS programs shares the H units.

    The state is passed on through ``after_h`` and ``after_c``: every program of the group reads all of h of the
    previous token and writes its own UNITS columns.

    Args (pointers unless noted otherwise):
        input_gates: ``[N, G * H]``, input product with all biases except b_hn, in the order of :class:`GateLayout`.
        b_hn: float32 ``[H]``, hidden bias of n of a GRU.
        w_hh: float32 ``[G * H, H]`` with its strides (integers).
        stored_h, stored_c: stored states ``[N, H]`` with their strides (integers), read at segment starts only.
        starts: uint8 ``[N]``.
        bounds: int64 ``[slots + 1]``: the token ranges of the slots.
        after_h, after_c: float32 ``[N, H]``, written.
        gates: ``[N, 4 * H]``, written with KEEP: LSTM i, f, g, o; GRU r, z, n and n's hidden product.
        flags: int32 ``[groups]``, zero: arrival counters.
    """
    GATES: tl.constexpr = 4 if LSTM else 3
    FIRST: tl.constexpr = 0 if LSTM else 1
    group = tl.program_id(0) // MEMBERS
    u = (tl.program_id(0) % MEMBERS) * UNITS + tl.arange(0, UNITS)
    u_in = u < HIDDEN
    slot = group * ROWS + tl.arange(0, ROWS)
    begin = tl.load(bounds + slot)
    length = tl.load(bounds + slot + 1) - begin
    steps = tl.minimum(tl.max(length), step_end)
    k0 = tl.arange(0, BLOCK_K)
    bias = tl.full([UNITS], 0.0, tl.float32)
    if LSTM == 0:
        bias = tl.load(b_hn + u, mask=u_in, other=0.0)
    if RESIDENT:  # a single block of K: the weights stay on the chip for all steps
        w_in = (k0 < HIDDEN)[:, None] & u_in[None, :]
        w0 = _weights(w_hh, w_row, w_column, k0, u, w_in, 0, HIDDEN, PRECISION)
        w1 = _weights(w_hh, w_row, w_column, k0, u, w_in, 1, HIDDEN, PRECISION)
        w2 = _weights(w_hh, w_row, w_column, k0, u, w_in, 2, HIDDEN, PRECISION)
        if LSTM:
            w3 = _weights(w_hh, w_row, w_column, k0, u, w_in, 3, HIDDEN, PRECISION)
    step = step_begin
    while step < steps:
        active = step < length
        token = begin + step
        first = tl.load(starts + token, mask=active, other=1) != 0
        inside = active[:, None] & u_in[None, :]
        x_at = input_gates + token[:, None] * (GATES * HIDDEN) + u[None, :]
        x0 = tl.load(x_at + FIRST * HIDDEN, mask=inside, other=0.0).to(tl.float32)
        x1 = tl.load(x_at + (FIRST + 1) * HIDDEN, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(x_at + (2 * HIDDEN if LSTM else 0), mask=inside, other=0.0).to(tl.float32)
        a0 = x0
        a1 = x1
        a2 = x2 if LSTM else tl.full([ROWS, UNITS], 0.0, tl.float32) + bias[None, :]
        if LSTM:
            a3 = tl.load(x_at + 3 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
        h_from = tl.where(first, stored_h + token * h_row, after_h + (token - 1) * HIDDEN)
        h_step = tl.where(first, h_column, 1)
        for k in range(0, HIDDEN, BLOCK_K):
            kk = k + k0
            h_in = active[:, None] & (kk < HIDDEN)[None, :]
            h = tl.load(h_from[:, None] + kk[None, :] * h_step[:, None], mask=h_in, other=0.0, cache_modifier=".cg")
            h = operand(h, PRECISION)
            if RESIDENT == 0:
                w_in = (kk < HIDDEN)[:, None] & u_in[None, :]
                w0 = _weights(w_hh, w_row, w_column, kk, u, w_in, 0, HIDDEN, PRECISION)
                w1 = _weights(w_hh, w_row, w_column, kk, u, w_in, 1, HIDDEN, PRECISION)
                w2 = _weights(w_hh, w_row, w_column, kk, u, w_in, 2, HIDDEN, PRECISION)
                if LSTM:
                    w3 = _weights(w_hh, w_row, w_column, kk, u, w_in, 3, HIDDEN, PRECISION)
            a0 = product(h, w0, a0, PRECISION)
            a1 = product(h, w1, a1, PRECISION)
            a2 = product(h, w2, a2, PRECISION)
            if LSTM:
                a3 = product(h, w3, a3, PRECISION)
        g0 = sigmoid(a0)
        g1 = sigmoid(a1)
        out = token[:, None] * HIDDEN + u[None, :]
        if LSTM:
            g2 = tanh(a2)
            g3 = sigmoid(a3)
            c_from = tl.where(first, stored_c + token * c_row, after_c + (token - 1) * HIDDEN)
            c_step = tl.where(first, c_column, 1)
            c = tl.load(c_from[:, None] + u[None, :] * c_step[:, None], mask=inside, other=0.0, cache_modifier=".cg")
            c = g1 * c + g0 * g2
            h_new = g3 * tanh(c)
            tl.store(after_c + out, c, mask=inside)
        else:
            g2 = tanh(x2 + g0 * a2)
            g3 = a2
            if gates.dtype.element_ty == tl.float16:  # the only kept value without a bound
                g3 = tl.minimum(tl.maximum(a2, -65504.0), 65504.0)
            h_at = h_from[:, None] + u[None, :] * h_step[:, None]
            h_own = tl.load(h_at, mask=inside, other=0.0, cache_modifier=".cg")
            h_new = g2 + g1 * (h_own - g2)
        tl.store(after_h + out, h_new, mask=inside)
        if KEEP:
            at = gates + token[:, None] * (4 * HIDDEN) + u[None, :]
            tl.store(at, g0.to(gates.dtype.element_ty), mask=inside)
            tl.store(at + HIDDEN, g1.to(gates.dtype.element_ty), mask=inside)
            tl.store(at + 2 * HIDDEN, g2.to(gates.dtype.element_ty), mask=inside)
            tl.store(at + 3 * HIDDEN, g3.to(gates.dtype.element_ty), mask=inside)
        if step + 1 < steps:
            meet(flags + group, (step - step_begin + 1) * MEMBERS, MEMBERS)
        step += 1
