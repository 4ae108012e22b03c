# pyright: basic, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, C901, PLR0912, PLR0913, PLR0915, RUF005
# Kernel bodies are a language of their own: Triton's types are known to its compiler alone, and a body is one function,
# however long, with all its arguments; its tuples grow by +, without unpacking.
"""Linear recurrences in one pass over memory: a program keeps its chunk in registers until it knows the state before.

A chunk is ROWS pieces of STEPS tokens, COLUMNS channels wide; a thread walks a piece, in the channels that it loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.triton.linear_parts import again, bits, is_set, load, states_before_rows, store, times


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
    ticket_at,
    tokens,
    nothing,
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
    """Write h. ``board`` holds EMPTY words; at ``ticket_at`` one of them counts the programs that have begun."""
    ticket = (tl.atomic_add(board + ticket_at, 1, sem="relaxed") + 1).to(tl.int32)
    chunk = ticket // BLOCKS
    d = (ticket % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    inside = d < WIDTH
    begin = chunk.to(tl.int64) * (STEPS * ROWS)
    row = begin + tl.arange(0, ROWS) * STEPS
    at = row[:, None] * WIDTH + d[None, :]
    stored_at = row[:, None] * states_row + d[None, :]
    step = tl.arange(0, STEPS)[None, :]
    none = (d[None, :] + tokens < 0).to(tl.int32)
    token = row[:, None] + step
    firsts = bits(tl.load(starts + token, mask=token < tokens, other=0), step, none)
    xs = ()
    xs_imag = ()
    factors = ()
    factors_imag = ()
    if CONSTANT:
        factor, factor_imag = load(a, d, inside, KIND)
        factor = tl.broadcast_to(factor[None, :], [ROWS, COLUMNS])
        factor_imag = tl.broadcast_to(factor_imag[None, :], [ROWS, COLUMNS])
    for s in tl.static_range(STEPS):
        mask = (row + s < tokens)[:, None] & inside[None, :]
        x, x_imag = load(b, at + s * WIDTH, mask, KIND)
        xs = xs + (x,)
        xs_imag = xs_imag + (x_imag,)
        if not CONSTANT:
            factor, factor_imag = load(a, at + s * WIDTH, mask, KIND)
            factors = factors + (factor,)
            factors_imag = factors_imag + (factor_imag,)
    p = tl.full([ROWS, COLUMNS], 1.0, ACC)
    p_imag = tl.zeros([ROWS, COLUMNS], ACC)
    q = tl.zeros([ROWS, COLUMNS], ACC)
    q_imag = tl.zeros([ROWS, COLUMNS], ACC)
    begun = ()
    begun_imag = ()
    for s in tl.static_range(STEPS):
        if s % 4 == 0:  # stored states that are fetched together
            found = ()
            found_imag = ()
            for k in tl.static_range(4):
                mask = is_set(firsts, s + k) & inside[None, :]
                stored, stored_imag = load(states, stored_at + (s + k) * states_row, mask, KIND)
                found = found + (stored,)
                found_imag = found_imag + (stored_imag,)
        if not CONSTANT:
            factor = factors[s]
            factor_imag = factors_imag[s]
        x = xs[s]
        x_imag = xs_imag[s]
        first = is_set(firsts, s)
        stored = found[s % 4]
        stored_imag = found_imag[s % 4]
        from_stored, from_stored_imag = times(factor, factor_imag, stored, stored_imag, KIND)
        x = tl.where(first, from_stored + x, x)
        x_imag = tl.where(first, from_stored_imag + x_imag, x_imag)
        begun = begun + (x,)
        begun_imag = begun_imag + (x_imag,)
        wide = factor.to(ACC)
        wide_imag = factor_imag.to(ACC)
        on, on_imag = times(wide, wide_imag, q, q_imag, KIND)
        q = tl.where(first, 0.0, on) + x.to(ACC)
        q_imag = tl.where(first, 0.0, on_imag) + x_imag.to(ACC)
        p, p_imag = times(wide, wide_imag, p, p_imag, KIND)
    cut = (firsts != 0).to(tl.int32)
    fresh = tl.load(starts + begin)
    state, state_imag = states_before_rows(
        p, p_imag, q, q_imag, cut, fresh, chunk, board, groups_at, d, inside,
        WIDTH, KIND, ACC, ROWS, COLUMNS, GROUP,
    )  # fmt: skip
    for s in tl.static_range(STEPS):
        if not CONSTANT:
            factor = factors[s]
            factor_imag = factors_imag[s]
        wide, wide_imag = again(factor, factor_imag, nothing, ACC, KIND)
        x, x_imag = again(begun[s], begun_imag[s], nothing, ACC, KIND)
        on, on_imag = times(wide, wide_imag, state, state_imag, KIND)
        first = is_set(firsts, s)
        state = tl.where(first, 0.0, on) + x
        state_imag = tl.where(first, 0.0, on_imag) + x_imag
        mask = (row + s < tokens)[:, None] & inside[None, :]
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
    ticket_at,
    tokens,
    nothing,
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
    """Write the gradients, last token first; of a constant a those of each chunk, ``[chunks, D]`` in float64.

    What is carried: c[n] = conj(a[n]) * (grad[n] + c[n + 1]), the gradient of the state before token n.
    """
    ticket = (tl.atomic_add(board + ticket_at, 1, sem="relaxed") + 1).to(tl.int32)
    chunk = ticket // BLOCKS
    d = (ticket % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    inside = d < WIDTH
    begin = tokens - 1 - chunk.to(tl.int64) * (STEPS * ROWS)  # the chunk's first token in the order of the walk
    row = begin - tl.arange(0, ROWS) * STEPS
    at = row[:, None] * WIDTH + d[None, :]
    stored_at = row[:, None] * states_row + d[None, :]
    step = tl.arange(0, STEPS)[None, :]
    none = (d[None, :] + tokens < 0).to(tl.int32)
    token = row[:, None] - step
    after = tl.load(starts + token + 1, mask=(token >= 0) & (token + 1 < tokens), other=1)
    lasts = bits(tl.where(token >= 0, after, 0), step, none)
    firsts = bits(tl.load(starts + token, mask=token >= 0, other=0), step, none)
    grads = ()
    grads_imag = ()
    factors = ()
    factors_imag = ()
    if CONSTANT:
        factor, factor_imag = load(a, d, inside, KIND)
        factor = tl.broadcast_to(factor[None, :], [ROWS, COLUMNS])
        factor_imag = tl.broadcast_to(-factor_imag[None, :], [ROWS, COLUMNS])
    for s in tl.static_range(STEPS):
        mask = (row - s >= 0)[:, None] & inside[None, :]
        x, x_imag = load(grad, at - s * WIDTH, mask, KIND)
        grads = grads + (x,)
        grads_imag = grads_imag + (x_imag,)
        if not CONSTANT:
            factor, factor_imag = load(a, at - s * WIDTH, mask, KIND)
            factors = factors + (factor,)
            factors_imag = factors_imag + (-factor_imag,)
    p = tl.full([ROWS, COLUMNS], 1.0, ACC)
    p_imag = tl.zeros([ROWS, COLUMNS], ACC)
    q = tl.zeros([ROWS, COLUMNS], ACC)
    q_imag = tl.zeros([ROWS, COLUMNS], ACC)
    for s in tl.static_range(STEPS):
        if not CONSTANT:
            factor = factors[s]
            factor_imag = factors_imag[s]
        wide = factor.to(ACC)
        wide_imag = factor_imag.to(ACC)
        last = is_set(lasts, s)
        x = tl.where(last, 0.0, q) + grads[s].to(ACC)
        x_imag = tl.where(last, 0.0, q_imag) + grads_imag[s].to(ACC)
        q, q_imag = times(wide, wide_imag, x, x_imag, KIND)
        p, p_imag = times(wide, wide_imag, p, p_imag, KIND)
    befores = ()
    befores_imag = ()
    for s in tl.static_range(STEPS):
        if TO_A:
            first = is_set(firsts, s)
            old = (row - s >= 0)[:, None] & (first == 0) & inside[None, :]
            before, before_imag = load(h, at - (s + 1) * WIDTH, old, KIND)
            stored, stored_imag = load(states, stored_at - s * states_row, first & inside[None, :], KIND)
            befores = befores + (tl.where(first, stored, before),)
            befores_imag = befores_imag + (-tl.where(first, stored_imag, before_imag),)
    cut = (lasts != 0).to(tl.int32)
    fresh = tl.load(starts + begin + 1, mask=begin + 1 < tokens, other=1)
    state, state_imag = states_before_rows(
        p, p_imag, q, q_imag, cut, fresh, chunk, board, groups_at, d, inside,
        WIDTH, KIND, ACC, ROWS, COLUMNS, GROUP,
    )  # fmt: skip
    total = tl.zeros([ROWS, COLUMNS], ACC)
    total_imag = tl.zeros([ROWS, COLUMNS], ACC)
    for s in tl.static_range(STEPS):
        if not CONSTANT:
            factor = factors[s]
            factor_imag = factors_imag[s]
        wide, wide_imag = again(factor, factor_imag, nothing, ACC, KIND)
        x, x_imag = again(grads[s], grads_imag[s], nothing, ACC, KIND)
        last = is_set(lasts, s)
        x += tl.where(last, 0.0, state)
        x_imag += tl.where(last, 0.0, state_imag)
        here = (row - s >= 0)[:, None]
        mask = here & inside[None, :]
        if TO_B:
            store(grad_b, at - s * WIDTH, x, x_imag, mask, KIND)
        if TO_A:
            to_a, to_a_imag = times(befores[s].to(ACC), befores_imag[s].to(ACC), x, x_imag, KIND)
            if CONSTANT:
                total += tl.where(here, to_a, 0.0)
                total_imag += tl.where(here, to_a_imag, 0.0)
            else:
                store(grad_a, at - s * WIDTH, to_a, to_a_imag, mask, KIND)
        state, state_imag = times(wide, wide_imag, x, x_imag, KIND)
        if TO_STATES:
            first = is_set(firsts, s)
            to_state = tl.where(first, state, 0.0)
            to_state_imag = tl.where(first, state_imag, 0.0)
            store(grad_states, at - s * WIDTH, to_state, to_state_imag, mask, KIND)
    if TO_A and CONSTANT:
        PARTS: tl.constexpr = 1 if KIND == "real" else 2
        to = grad_a + (chunk.to(tl.int64) * WIDTH + d) * PARTS
        tl.store(to, tl.sum(total, 0).to(tl.float64), mask=inside)
        if KIND != "real":
            tl.store(to + 1, tl.sum(total_imag, 0).to(tl.float64), mask=inside)
