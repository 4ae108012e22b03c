# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, C901, PLR0912, PLR0913, PLR0915, RUF005
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments. Tuples grow by +, since there is no unpacking.
"""Linear recurrences in one pass over memory.

A chunk is ROWS pieces of STEPS tokens, COLUMNS channels wide. A thread processes a piece, in the channels that it
loads, twice: first from a zero state, which yields the map of the piece from the state before it, then from that state.
In between, the chunk and all other inputs of the second sweep stay in registers. Forward passes without KEEP, which
need fewer registers, read them again from the caches.

A piece is short, and computed in the dtype of its numbers (float32 for narrower ones). Products of its factors and
states between pieces are in ACC: only their errors grow with the length of the sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.cuda.linear.parts import (
    bits,
    is_set,
    load,
    power,
    states_before,
    states_before_rows,
    store,
    stored_states,
    times,
    times_plus,
)


@triton.jit
def _fetched(
    a, b, at, piece, left, inside, WIDTH: tl.constexpr, CONSTANT: tl.constexpr, KIND: tl.constexpr, STEPS: tl.constexpr
):
    """Return the inputs of a piece: b of each token, and a where it varies."""
    xs = ()
    xs_imag = ()
    factors = ()
    factors_imag = ()
    for s in tl.static_range(STEPS):
        mask = (piece + s < left)[:, None] & inside[None, :]
        x, x_imag = load(b, at + s * WIDTH, mask, KIND)
        xs = xs + (x,)
        xs_imag = xs_imag + (x_imag,)
        if not CONSTANT:
            factor, factor_imag = load(a, at + s * WIDTH, mask, KIND)
            factors = factors + (factor,)
            factors_imag = factors_imag + (factor_imag,)
    return xs, xs_imag, factors, factors_imag


@triton.jit
def forward_kernel(
    a,
    b,
    states,
    states_row,
    starts,
    h,
    board,
    groups_at,
    tokens,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    CONSTANT: tl.constexpr,
    KIND: tl.constexpr,
    ACC: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Write h. ``board`` holds EMPTY words."""
    chunk = tl.program_id(0) // BLOCKS
    d = (tl.program_id(0) % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (d < WIDTH) | (WIDTH % COLUMNS == 0)
    begin = chunk.to(tl.int64) * (STEPS * ROWS)
    left = tl.minimum(tokens - begin, STEPS * ROWS).to(tl.int32)
    piece = tl.arange(0, ROWS) * STEPS
    row = begin + piece
    at = row[:, None] * WIDTH + d[None, :]
    stored_at = row[:, None] * states_row + d[None, :]
    step = tl.arange(0, STEPS)[None, :]
    token = row[:, None] + step
    firsts = bits(tl.load(starts + token, mask=token < tokens, other=0), step)
    if CONSTANT:
        factor, factor_imag = load(a, d, inside, KIND)
        factor = tl.broadcast_to(factor[None, :], [ROWS, COLUMNS])
        factor_imag = tl.broadcast_to(factor_imag[None, :], [ROWS, COLUMNS])
        p, p_imag = power(factor.to(ACC), factor_imag.to(ACC), STEPS, KIND)
    xs, xs_imag, factors, factors_imag = _fetched(a, b, at, piece, left, inside, WIDTH, CONSTANT, KIND, STEPS)
    values = ()  # kept values: at the first token of a segment the state after it, elsewhere b
    values_imag = ()
    for s in tl.static_range(STEPS):
        if s % 4 == 0:
            found, found_imag = stored_states(states, stored_at, states_row, firsts, s, inside, KIND)
        if not CONSTANT:
            factor = factors[s]
            factor_imag = factors_imag[s]
            if s == 0:
                p = factor.to(ACC)
                p_imag = factor_imag.to(ACC)
            else:
                p, p_imag = times(factor.to(ACC), factor_imag.to(ACC), p, p_imag, KIND)
        if s == 0:
            q = tl.zeros_like(factor)
            q_imag = q
        first = is_set(firsts, s)
        q = tl.where(first, found[s % 4], q)
        q_imag = tl.where(first, found_imag[s % 4], q_imag)
        q, q_imag = times_plus(factor, factor_imag, q, q_imag, xs[s], xs_imag[s], KIND)
        if KEEP:
            values = values + (tl.where(first, q, xs[s]),)
            values_imag = values_imag + (tl.where(first, q_imag, xs_imag[s]),)
    p = tl.where(firsts != 0, float("nan"), p)
    fresh = tl.load(starts + begin)
    state, state_imag = states_before_rows(
        p, p_imag, q, q_imag, fresh, chunk, board, groups_at, d, inside, WIDTH, KIND, ACC, ROWS, COLUMNS, GROUP
    )
    if not KEEP:
        xs, xs_imag, factors, factors_imag = _fetched(a, b, at, piece, left, inside, WIDTH, CONSTANT, KIND, STEPS)
    for s in tl.static_range(STEPS):
        mask = (piece + s < left)[:, None] & inside[None, :]
        if not CONSTANT:
            factor = factors[s]
            factor_imag = factors_imag[s]
        first = is_set(firsts, s)
        if KEEP:
            on, on_imag = times_plus(factor, factor_imag, state, state_imag, values[s], values_imag[s], KIND)
            state = tl.where(first, values[s], on)
            state_imag = tl.where(first, values_imag[s], on_imag)
        else:
            if s % 4 == 0:
                found, found_imag = stored_states(states, stored_at, states_row, firsts, s, inside, KIND)
            state = tl.where(first, found[s % 4], state)
            state_imag = tl.where(first, found_imag[s % 4], state_imag)
            state, state_imag = times_plus(factor, factor_imag, state, state_imag, xs[s], xs_imag[s], KIND)
        store(h, at + s * WIDTH, state, state_imag, mask, KIND)


@triton.jit
def backward_kernel(
    a,
    h,
    grad,
    states,
    states_row,
    starts,
    grad_a,
    grad_b,
    grad_states,
    board,
    groups_at,
    tokens,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    CONSTANT: tl.constexpr,
    TO_A: tl.constexpr,
    TO_B: tl.constexpr,
    TO_STATES: tl.constexpr,
    KIND: tl.constexpr,
    ACC: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write the gradients, last token first; that of a constant a per chunk, ``[chunks, D]`` in float64.

    The carried value is c[n] = conj(a[n]) * (grad[n] + c[n + 1]), the gradient of the state before token n.
    """
    chunk = tl.program_id(0) // BLOCKS
    d = (tl.program_id(0) % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (d < WIDTH) | (WIDTH % COLUMNS == 0)
    # Chunks are those of the forward pass: tokens missing in the last one are missing before the first processed token.
    end = (tl.cdiv(tokens, STEPS * ROWS) - chunk).to(tl.int64) * (STEPS * ROWS)
    missing = tl.maximum(end - tokens, 0).to(tl.int32)
    piece = tl.arange(0, ROWS) * STEPS
    row = end - 1 - piece  # the first token of each piece in processing order
    at = row[:, None] * WIDTH + d[None, :]
    stored_at = row[:, None] * states_row + d[None, :]
    token = (end - STEPS - piece)[:, None] + tl.arange(0, STEPS)[None, :]  # ascending, as in memory
    step = STEPS - 1 - tl.arange(0, STEPS)[None, :]
    after = tl.load(starts + token + 1, mask=token + 1 < tokens, other=1)
    lasts = bits(after, step)
    firsts = bits(tl.load(starts + token, mask=token < tokens, other=0), step)
    if CONSTANT:
        factor, factor_imag = load(a, d, inside, KIND)
        factor = tl.broadcast_to(factor[None, :], [ROWS, COLUMNS])
        factor_imag = tl.broadcast_to(-factor_imag[None, :], [ROWS, COLUMNS])
        p, p_imag = power(factor.to(ACC), factor_imag.to(ACC), STEPS, KIND)
    grads = ()
    grads_imag = ()
    factors = ()
    factors_imag = ()
    for s in tl.static_range(STEPS):
        mask = (piece + s >= missing)[:, None] & inside[None, :]
        x, x_imag = load(grad, at - s * WIDTH, mask, KIND)
        grads = grads + (x,)
        grads_imag = grads_imag + (x_imag,)
        if not CONSTANT:
            factor, factor_imag = load(a, at - s * WIDTH, mask, KIND)
            factors = factors + (factor,)
            factors_imag = factors_imag + (-factor_imag,)
    befores = ()
    befores_imag = ()
    if TO_A:
        for s in tl.static_range(STEPS):
            mask = (piece + s >= missing)[:, None] & inside[None, :]
            before, before_imag = states_before(h, at, states, stored_at, states_row, firsts, s, mask, WIDTH, KIND)
            befores = befores + (before,)
            befores_imag = befores_imag + (before_imag,)
    for s in tl.static_range(STEPS):
        x = grads[s]
        x_imag = grads_imag[s]
        if s == 0:
            q = x
            q_imag = x_imag
        else:  # times the factor of the previously processed token
            on, on_imag = times_plus(factor, factor_imag, q, q_imag, x, x_imag, KIND)
            last = is_set(lasts, s)
            q = tl.where(last, x, on)
            q_imag = tl.where(last, x_imag, on_imag)
        if not CONSTANT:
            factor = factors[s]
            factor_imag = factors_imag[s]
            if s == 0:
                p = factor.to(ACC)
                p_imag = factor_imag.to(ACC)
            else:
                p, p_imag = times(factor.to(ACC), factor_imag.to(ACC), p, p_imag, KIND)
    q, q_imag = times(factor, factor_imag, q, q_imag, KIND)
    p = tl.where(lasts != 0, float("nan"), p)
    fresh = tl.load(starts + end, mask=end < tokens, other=1)
    state, state_imag = states_before_rows(
        p, p_imag, q, q_imag, fresh, chunk, board, groups_at, d, inside, WIDTH, KIND, ACC, ROWS, COLUMNS, GROUP
    )
    total = tl.zeros_like(state)
    total_imag = total
    for s in tl.static_range(STEPS):
        mask = (piece + s >= missing)[:, None] & inside[None, :]
        x = grads[s]
        x_imag = grads_imag[s]
        last = is_set(lasts, s)
        if s == 0:
            on = x + state
            on_imag = x_imag + state_imag
        else:
            on, on_imag = times_plus(factor, factor_imag, state, state_imag, x, x_imag, KIND)
        state = tl.where(last, x, on)
        state_imag = tl.where(last, x_imag, on_imag)
        if TO_B:
            store(grad_b, at - s * WIDTH, state, state_imag, mask, KIND)
        if TO_A:
            if CONSTANT:
                total, total_imag = times_plus(befores[s], -befores_imag[s], state, state_imag, total, total_imag, KIND)
            else:
                to_a, to_a_imag = times(befores[s], -befores_imag[s], state, state_imag, KIND)
                store(grad_a, at - s * WIDTH, to_a, to_a_imag, mask, KIND)
        if not CONSTANT:
            factor = factors[s]
            factor_imag = factors_imag[s]
        if TO_STATES:
            first = is_set(firsts, s)
            to_state, to_state_imag = times(factor, factor_imag, state, state_imag, KIND)
            to_state = tl.where(first, to_state, 0.0)
            to_state_imag = tl.where(first, to_state_imag, 0.0)
            store(grad_states, at - s * WIDTH, to_state, to_state_imag, mask, KIND)
    if TO_A and CONSTANT:
        PARTS: tl.constexpr = 1 if KIND == "real" else 2
        to = grad_a + (chunk.to(tl.int64) * WIDTH + d) * PARTS
        tl.store(to, tl.sum(total.to(tl.float64), 0), mask=inside)
        if KIND != "real":
            tl.store(to + 1, tl.sum(total_imag.to(tl.float64), 0), mask=inside)
