# pyright: basic, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202, C901, PLR0913, PLR0915
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Backward recurrence in plain Triton: any hidden size, any sm_80 or newer, and the interpreter.

A program computes UNITS hidden units of 16 slots, from their last step to the first, with weights as in the forward
pass; the gradients of the gates of the next step are read from global memory. What it computes is
:func:`recurl.recurrence.cuda.definition.backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.cuda.parts import meet, operand, product, tanh


@triton.jit
def _weights(w_hh, k, u, inside, gate: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr):
    # W[gate][k, u] as the right operand [k, u].
    at = w_hh + (gate * HIDDEN + k)[:, None] * HIDDEN + u[None, :]
    return operand(tl.load(at, mask=inside, other=0.0), PRECISION)


@triton.jit
def _add(at, inside, w, acc, PRECISION: tl.constexpr):
    gradient = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    return product(operand(gradient, PRECISION), w, acc, PRECISION)


@triton.jit
def backward_kernel(
    grad_h,
    gh_row,
    gh_column,
    grad_c,
    gc_row,
    gc_column,
    gates,
    w_hh,
    stored,
    stored_row,
    stored_column,
    after_h,
    after_c,
    starts,
    bounds,
    grad_gates,
    grad_stored,
    carry,
    flags,
    step_begin,
    step_end,
    HIDDEN: tl.constexpr,
    LSTM: tl.constexpr,
    TO_STORED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RESIDENT: tl.constexpr,
):
    """Run ROWS slots from their last token to their first; see :func:`forward_kernel` for the common arguments.

    Args (pointers unless noted otherwise):
        grad_h, grad_c: gradients of the states after every token ``[N, H]``, with their strides (integers).
        gates: ``[N, 4 * H]``, as the forward kernel keeps them.
        stored: the stored state that the pointwise part reads (LSTM c, GRU h), with its strides (integers).
        after_h, after_c: states after every token, float32 ``[N, H]``.
        grad_gates: ``[N, 4 * H]``, written. LSTM: i, f, g, o. GRU: input part of n, r, z, hidden part of n, so that
            columns [0, 3 H) belong to the input product and [H, 4 H) to the hidden one.
        grad_stored: float32 ``[N, H]``, zero; written with TO_STORED at segment starts. LSTM: the gradient of c. GRU:
            the part of h's gradient that bypasses the hidden product.
        carry: float32 ``[slots, MEMBERS * UNITS]``, zero: that pointwise part, passed from token to token.
    """
    group = tl.program_id(0) // MEMBERS
    member = tl.program_id(0) % MEMBERS
    u = member * UNITS + tl.arange(0, UNITS)
    u_in = u < HIDDEN
    slot = group * ROWS + tl.arange(0, ROWS)
    begin = tl.load(bounds + slot)
    end = tl.load(bounds + slot + 1)
    length = end - begin
    steps = tl.minimum(tl.max(length), step_end)
    k0 = tl.arange(0, BLOCK_K)
    HELD: tl.constexpr = 0 if LSTM else HIDDEN  # first column of the hidden part of grad_gates
    carry_at = carry + slot[:, None] * (MEMBERS * UNITS) + u[None, :]
    carried = tl.load(carry_at)
    if RESIDENT:
        w_in = (k0 < HIDDEN)[:, None] & u_in[None, :]
        w0 = _weights(w_hh, k0, u, w_in, 0, HIDDEN, PRECISION)
        w1 = _weights(w_hh, k0, u, w_in, 1, HIDDEN, PRECISION)
        w2 = _weights(w_hh, k0, u, w_in, 2, HIDDEN, PRECISION)
        if LSTM:
            w3 = _weights(w_hh, k0, u, w_in, 3, HIDDEN, PRECISION)
    step = step_begin
    while step < steps:
        active = step < length
        token = end - 1 - step
        first = tl.load(starts + token, mask=active, other=1) != 0
        linked = active & (step > 0)
        linked = linked & (tl.load(starts + token + 1, mask=linked, other=1) == 0)
        inside = active[:, None] & u_in[None, :]
        at = gates + token[:, None] * (4 * HIDDEN) + u[None, :]
        g0 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        g1 = tl.load(at + HIDDEN, mask=inside, other=0.0).to(tl.float32)
        g2 = tl.load(at + 2 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
        g3 = tl.load(at + 3 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
        own = token[:, None] * HIDDEN + u[None, :]
        gh_at = grad_h + token[:, None] * gh_row + u[None, :] * gh_column
        dh = tl.load(gh_at, mask=inside, other=0.0).to(tl.float32)
        after = after_c if LSTM else after_h
        before_from = tl.where(first, stored + token * stored_row, after + (token - 1) * HIDDEN)
        before_step = tl.where(first, stored_column, 1)
        before = tl.load(before_from[:, None] + u[None, :] * before_step[:, None], mask=inside, other=0.0)
        back = tl.full([ROWS, UNITS], 0.0, tl.float32)
        for k in range(0, HIDDEN, BLOCK_K):
            kk = k + k0
            d_in = linked[:, None] & (kk < HIDDEN)[None, :]
            d_at = grad_gates + (token + 1)[:, None] * (4 * HIDDEN) + HELD + kk[None, :]
            if RESIDENT == 0:
                w_in = (kk < HIDDEN)[:, None] & u_in[None, :]
                w0 = _weights(w_hh, kk, u, w_in, 0, HIDDEN, PRECISION)
                w1 = _weights(w_hh, kk, u, w_in, 1, HIDDEN, PRECISION)
                w2 = _weights(w_hh, kk, u, w_in, 2, HIDDEN, PRECISION)
                if LSTM:
                    w3 = _weights(w_hh, kk, u, w_in, 3, HIDDEN, PRECISION)
            back = _add(d_at, d_in, w0, back, PRECISION)
            back = _add(d_at + HIDDEN, d_in, w1, back, PRECISION)
            back = _add(d_at + 2 * HIDDEN, d_in, w2, back, PRECISION)
            if LSTM:
                back = _add(d_at + 3 * HIDDEN, d_in, w3, back, PRECISION)
        dh += back
        carried = tl.where(linked[:, None], carried, 0.0)
        d_type = grad_gates.dtype.element_ty
        d_to = grad_gates + token[:, None] * (4 * HIDDEN) + u[None, :]
        if LSTM:
            c = tl.load(after_c + own, mask=inside, other=0.0)
            gc_at = grad_c + token[:, None] * gc_row + u[None, :] * gc_column
            tanh_c = tanh(c)
            dc = tl.load(gc_at, mask=inside, other=0.0).to(tl.float32) + carried + dh * g3 * (1.0 - tanh_c * tanh_c)
            tl.store(d_to, (dc * g2 * g0 * (1.0 - g0)).to(d_type), mask=inside)
            tl.store(d_to + HIDDEN, (dc * before * g1 * (1.0 - g1)).to(d_type), mask=inside)
            tl.store(d_to + 2 * HIDDEN, (dc * g0 * (1.0 - g2 * g2)).to(d_type), mask=inside)
            tl.store(d_to + 3 * HIDDEN, (dh * tanh_c * g3 * (1.0 - g3)).to(d_type), mask=inside)
            carried = dc * g1
        else:
            dh += carried
            dn = dh * (1.0 - g1) * (1.0 - g2 * g2)
            tl.store(d_to, dn.to(d_type), mask=inside)
            tl.store(d_to + HIDDEN, (dn * g3 * g0 * (1.0 - g0)).to(d_type), mask=inside)
            tl.store(d_to + 2 * HIDDEN, (dh * (before - g2) * g1 * (1.0 - g1)).to(d_type), mask=inside)
            tl.store(d_to + 3 * HIDDEN, (dn * g0).to(d_type), mask=inside)
            carried = dh * g1
        if TO_STORED:
            tl.store(grad_stored + own, carried, mask=inside & first[:, None])
        if step + 1 < steps:
            meet(flags + group, (step - step_begin + 1) * MEMBERS, MEMBERS)
        step += 1
    tl.store(carry_at, carried)
