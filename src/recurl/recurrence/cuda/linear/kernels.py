# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, C901, PLR0912, PLR0913, PLR0915, RUF005
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments. Tuples grow by +, since there is no unpacking.
"""Linear recurrences in one pass over memory.

A chunk is ROWS pieces of STEPS tokens, COLUMNS channels wide, and the work of one program. In plain torch, the forward
kernel is, for each chunk::

    b = torch.where(first, a * states + b, b)  # from here on the state at first tokens; states are read nowhere else
    q = sweep(a, b, first, torch.zeros(D))[-1]  # state = torch.where(first, b, a * state + b), token by token
    p = nan if first.any() else a.prod(0)  # q and p, the map of the chunk, are published
    h = sweep(a, b, first, state_before)  # which follows from what chunks before this one have published

A thread processes a piece, in the channels that it loads, by both sweeps; the maps of the pieces are composed between
them. The chunk and all other inputs of the second sweep stay in registers: each number is read from memory once, and
all of them are under way together.

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
def _with_stored(
    values,
    values_imag,
    factors,
    factors_imag,
    states,
    at,
    row,
    firsts,
    inside,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Replace b of the first token of each segment by the state after it; chunks without any read nothing."""
    if tl.max(tl.max(firsts, 1), 0) != 0:
        made = ()
        made_imag = ()
        for s in tl.static_range(STEPS):
            if s % 4 == 0:
                found, found_imag = stored_states(states, at, row, firsts, s, inside, KIND)
            x = values[s]
            x_imag = values_imag[s]
            on, on_imag = times_plus(factors[s], factors_imag[s], found[s % 4], found_imag[s % 4], x, x_imag, KIND)
            first = is_set(firsts, s)
            made = made + (tl.where(first, on, x),)
            made_imag = made_imag + (tl.where(first, on_imag, x_imag),)
        values = made
        values_imag = made_imag
    return values, values_imag


@triton.jit
def _stepped(
    state,
    state_imag,
    factors,
    factors_imag,
    values,
    values_imag,
    firsts,
    step: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return the state after a token of a piece: its value if it starts a segment, else factor * state + value."""
    x = values[step]
    x_imag = values_imag[step]
    on, on_imag = times_plus(factors[step], factors_imag[step], state, state_imag, x, x_imag, KIND)
    first = is_set(firsts, step)
    return tl.where(first, x, on), tl.where(first, x_imag, on_imag)


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
    flags = tl.load(starts + token, mask=token < tokens, other=0)
    fresh = tl.load(starts + begin)
    if CONSTANT:
        factor, factor_imag = load(a, d, inside, KIND)
        factor = tl.broadcast_to(factor[None, :], [ROWS, COLUMNS])
        factor_imag = tl.broadcast_to(factor_imag[None, :], [ROWS, COLUMNS])
    values = ()
    values_imag = ()
    factors = ()
    factors_imag = ()
    for s in tl.static_range(STEPS):
        mask = (piece + s < left)[:, None] & inside[None, :]
        x, x_imag = load(b, at + s * WIDTH, mask, KIND)
        values = values + (x,)
        values_imag = values_imag + (x_imag,)
        if not CONSTANT:
            factor, factor_imag = load(a, at + s * WIDTH, mask, KIND)
        factors = factors + (factor,)
        factors_imag = factors_imag + (factor_imag,)
    tl.debug_barrier()  # or ptxas moves each load down to its first use: as many waits for memory, one after another
    firsts = bits(flags, step)
    values, values_imag = _with_stored(
        values, values_imag, factors, factors_imag, states, stored_at, states_row, firsts, inside, KIND, STEPS
    )
    if CONSTANT:
        p, p_imag = power(factor.to(ACC), factor_imag.to(ACC), STEPS, KIND)
    q = tl.zeros_like(values[0])
    q_imag = q
    for s in tl.static_range(STEPS):
        if not CONSTANT:
            if s == 0:
                p = factors[s].to(ACC)
                p_imag = factors_imag[s].to(ACC)
            else:
                p, p_imag = times(factors[s].to(ACC), factors_imag[s].to(ACC), p, p_imag, KIND)
        q, q_imag = _stepped(q, q_imag, factors, factors_imag, values, values_imag, firsts, s, KIND)
    p = tl.where(firsts != 0, float("nan"), p)
    state, state_imag = states_before_rows(
        p, p_imag, q, q_imag, fresh, chunk, board, groups_at, d, inside, WIDTH, KIND, ACC, ROWS, COLUMNS, GROUP
    )
    for s in tl.static_range(STEPS):
        mask = (piece + s < left)[:, None] & inside[None, :]
        state, state_imag = _stepped(state, state_imag, factors, factors_imag, values, values_imag, firsts, s, KIND)
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
    """Write the gradients, last token first; that of a constant a per chunk, ``[chunks, D]`` in ACC.

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
        tl.store(to, tl.sum(total.to(ACC), 0), mask=inside)
        if KIND != "real":
            tl.store(to + 1, tl.sum(total_imag.to(ACC), 0), mask=inside)
