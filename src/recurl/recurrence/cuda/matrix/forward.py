# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, C901, PLR0912, PLR0913, PLR0915, SIM108
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments. An if on a constant is a statement because only one of its branches is compiled.
"""Forward pass of matrix recurrences, a chunk of tokens at a time.

Let D[t, s] be the decay from token s to token t of the same segment, e[t] that from the state which the segment has
at the start of the chunk, S (carried from the chunk before, or stored where the segment starts inside the chunk)::

    y = value - e * (key @ S)                                # without delta: value
    y = inverse(I + strict_tril(D * (key @ key.T)) * b) @ y  # without delta: value
    u = b * y
    output = (D * (query @ key.T)) @ u + e * (query @ S)
    S = e[-1] * S + (D[-1] * key).T @ u

A row of chunks may be cut into pieces that run side by side. What a piece does to the state before it is a linear map,
S -> transfer @ S + added: the same kernel finds ``added`` as the state after a piece from zero, and, as the state from
the identity with values of zero, ``transfer``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.cuda.matrix.parts import (
    at,
    clean,
    decays,
    dot,
    inverse,
    is_bad,
    matrix,
    next_stored,
    poison,
    rows,
    segments,
    store_matrix,
    store_rows,
)


@triton.jit
def stored_state(
    states,
    token,
    head,
    states_token,
    states_head,
    states_key,
    states_value,
    spacing,
    k,
    v,
    keys,
    values,
    HAS_STATES: tl.constexpr,
):
    """Load the state stored at a token, zeros if there is none."""
    if HAS_STATES:
        offset = token // spacing * states_token + head * states_head
        state = matrix(states, offset, states_key, states_value, k, v, tl.where(token % spacing == 0, keys, 0), values)
    else:
        state = tl.zeros([k.shape[0], v.shape[0]], tl.float32)
    return state


@triton.jit
def forward_kernel(
    query,
    query_token,
    query_head,
    key,
    key_token,
    key_head,
    value,
    value_token,
    value_head,
    log_decay,
    rate,
    states,
    states_token,
    states_head,
    states_key,
    states_value,
    spacing,
    start_index,
    output,
    solved,
    after,
    carried,
    added,
    transfer,
    heads,
    length,
    chunks,
    pieces,
    piece_chunks,
    slots,
    slot_step,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_STATES: tl.constexpr,
    MAPS: tl.constexpr,
    AFTER: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write outputs, states after segments, and what the backward pass reads; or with MAPS the maps of the pieces."""
    SOLVE: tl.constexpr = "tf32" if PRECISION == "bf16" else PRECISION
    program = tl.program_id(0)
    block = program % BLOCKS
    head = (program // BLOCKS) % heads
    piece = (program // BLOCKS // heads) % pieces
    row = program // BLOCKS // heads // pieces
    VALUES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    of_identity = block >= VALUES  # a block of the transfer matrix: from the identity, with values and stored states 0
    k = tl.arange(0, BLOCK_K)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    if MAPS:
        columns = tl.where(of_identity, 0, V)  # those of values and stored states
    else:
        columns = V
    t = tl.arange(0, CHUNK)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    total = 0.0
    first_chunk = piece * piece_chunks
    if MAPS:
        if of_identity:
            state = tl.where(k[:, None] == (v - VALUES * BLOCK_V)[None, :], 1.0, state)
    elif piece > 0:
        slot = row.to(tl.int64) * slots + piece * slot_step - 1
        state = matrix(carried, (slot * heads + head) * (K * V), V, 1, k, v, K, V)
    for chunk in range(first_chunk, tl.minimum(first_chunk + piece_chunks, chunks)):
        begin = row.to(tl.int64) * length + chunk * CHUNK
        last = tl.minimum(begin + CHUNK, (row.to(tl.int64) + 1) * length) - 1
        count = (last - begin).to(tl.int32)
        inside = t <= count
        segment = segments(start_index, begin, tl.minimum(t, count))
        last_segment = segments(start_index, begin, count)
        if tl.load(start_index + begin) == begin:
            state = stored_state(
                states, begin, head, states_token, states_head, states_key, states_value, spacing, k, v, K, columns,
                HAS_STATES,
            )  # fmt: skip
        elif KEEP and chunk > first_chunk:
            slot = row.to(tl.int64) * slots + chunk - 1
            store_matrix(carried, (slot * heads + head) * (K * V), k, v, state, K, V)
        first = begin * heads + head
        elapsed = decays(log_decay + first, t * heads, inside, segment == t)
        b = tl.load(rate + first + t * heads, mask=inside, other=0.0)
        keys = rows(key + begin * key_token + head * key_head, t, key_token, k, inside, K)
        y = rows(value + begin * value_token + head * value_head, t, value_token, v, inside, columns)
        before = tl.zeros([CHUNK, BLOCK_V], tl.float32)  # key @ S
        result = tl.zeros([CHUNK, BLOCK_V], tl.float32)  # query @ S
        if DELTA:
            before = tl.where((segment == 0)[:, None], dot(keys, state, PRECISION), 0.0)
        if not MAPS:
            queries = rows(query + begin * query_token + head * query_head, t, query_token, k, inside, K)
            result = tl.where((segment == 0)[:, None], dot(queries, state, PRECISION), 0.0)
        if HAS_STATES and (DELTA or not MAPS):
            start = next_stored(segment, 0, begin, spacing, CHUNK)
            while start < CHUNK:
                stored = stored_state(
                    states, begin + start, head, states_token, states_head, states_key, states_value, spacing, k, v, K,
                    columns, HAS_STATES,
                )  # fmt: skip
                own = (segment == start)[:, None]
                if DELTA:
                    before = tl.where(own, dot(keys, stored, PRECISION), before)
                if not MAPS:
                    result = tl.where(own, dot(queries, stored, PRECISION), result)
                start = next_stored(segment, start, begin, spacing, CHUNK)
        decay = tl.exp2(elapsed)
        same = (segment[:, None] == segment[None, :]) & (t[:, None] >= t[None, :])
        between = tl.exp2(elapsed[:, None] - elapsed[None, :])
        if DELTA:
            y -= decay[:, None] * before
        bad = poison(y) + b * 0.0
        spoilt = is_bad(bad)
        if spoilt:
            b = clean(b)
            y = clean(y)
        if DELTA:
            mixed = between * dot(keys, tl.trans(keys), PRECISION) * b[None, :]
            mixed = tl.where(same & (t[:, None] > t[None, :]), clean(mixed), 0.0)
            y = dot(tl.where(same, inverse(mixed, CHUNK, SOLVE) + bad[None, :], 0.0), y, SOLVE)
            if KEEP and not MAPS:
                store_rows(solved + first * V, t, heads * V, v, inside, y, V)
            if spoilt:
                y = clean(y)
        u = b[:, None] * y
        between += bad[None, :]
        if not MAPS:
            weights = tl.where(same, between * dot(queries, tl.trans(keys), PRECISION), 0.0)
            result = dot(weights, u, PRECISION) + decay[:, None] * result
            store_rows(output + first * V, t, heads * V, v, inside, result, V)
        if AFTER:
            ends = (t < count) & (segments(start_index, begin, tl.minimum(t + 1, count)) == t + 1)
            end = tl.min(tl.where(ends, t, CHUNK), 0)
            while end < CHUNK:
                origin = at(segment, t, end)
                left = at(elapsed, t, end)
                found = state
                if origin > 0:
                    found = stored_state(
                        states, begin + origin, head, states_token, states_head, states_key, states_value, spacing, k,
                        v, K, V, HAS_STATES,
                    )  # fmt: skip
                reached = (segment == origin) & (t <= end)
                weight = tl.exp2(left - elapsed) + bad
                weighted = tl.where(reached[:, None], weight[:, None] * keys, 0.0)
                found = tl.exp2(left) * found + dot(tl.trans(weighted), u, PRECISION)
                store_matrix(after, ((begin + end) * heads + head) * (K * V), k, v, found, K, V)
                end = tl.min(tl.where(ends & (t > end), t, CHUNK), 0)
        if last_segment > 0:
            state = stored_state(
                states, begin + last_segment, head, states_token, states_head, states_key, states_value, spacing, k, v,
                K, columns, HAS_STATES,
            )  # fmt: skip
        left = at(elapsed, t, CHUNK - 1)
        total += left
        weight = tl.exp2(left - elapsed) + bad
        weighted = tl.where((segment == last_segment)[:, None], weight[:, None] * keys, 0.0)
        state = tl.exp2(left) * state + dot(tl.trans(weighted), u, PRECISION)
        if AFTER:
            following = tl.minimum(last + 1, (row.to(tl.int64) + 1) * length - 1)
            if (last + 1 == (row.to(tl.int64) + 1) * length) | (tl.load(start_index + following) == last + 1):
                store_matrix(after, (last * heads + head) * (K * V), k, v, state, K, V)
    if MAPS:
        of_piece = (row.to(tl.int64) * pieces + piece) * heads + head
        if of_identity:
            store_matrix(transfer, of_piece * (K * K), k, v - VALUES * BLOCK_V, state, K, K)
        else:
            store_matrix(added, of_piece * (K * V), k, v, state, K, V)
            if not DELTA:
                tl.store(transfer + of_piece, tl.exp2(total), mask=block == 0)


@triton.jit
def carry_kernel(
    added,
    transfer,
    start_index,
    carried,
    heads,
    length,
    pieces,
    piece_tokens,
    slots,
    slot_step,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DELTA: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the state before each piece but the first; in reverse the gradient that reaches each piece but the last.

    ``added`` and ``transfer`` are those of all pieces but the last; in reverse ``added`` is that of all but the first.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    head = (program // BLOCKS) % heads
    row = (program // BLOCKS // heads).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    other = tl.arange(0, BLOCK_K)
    v = (program % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for step in range(pieces - 1):
        piece = pieces - 1 - step if REVERSE else step
        source = (row * (pieces - 1) + (piece - 1 if REVERSE else piece)) * heads + head
        found = matrix(added, source * (K * V), V, 1, k, v, K, V)
        begin = row * length + piece * piece_tokens
        last = tl.minimum(begin + piece_tokens, (row + 1) * length) - 1
        if (step > 0) & (tl.load(start_index + last) < begin):
            of_piece = (row * (pieces - 1) + piece) * heads + head
            if not DELTA:
                found += tl.load(transfer + of_piece) * state
            elif REVERSE:
                found += dot(matrix(transfer, of_piece * (K * K), 1, K, k, other, K, K), state, PRECISION)
            else:
                found += dot(matrix(transfer, of_piece * (K * K), K, 1, k, other, K, K), state, PRECISION)
        state = found
        to = row * (pieces - 1) + piece - 1 if REVERSE else row * slots + (piece + 1) * slot_step - 1
        store_matrix(carried, (to * heads + head) * (K * V), k, v, state, K, V)
