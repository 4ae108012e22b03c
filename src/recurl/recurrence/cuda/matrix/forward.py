# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, C901, PLR0912, PLR0913, PLR0915
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments. An if on a constant is a statement because only one of its branches is compiled.
"""Forward pass of matrix recurrences, a chunk of tokens at a time.

Let D[t, s] be the decay from token s to token t of the same segment, e[t] that from the state which the segment has
at the start of the chunk, S (carried from the chunk before, or stored where the segment starts inside the chunk)::

    y = value
    y = y_value - y_key @ S  # with delta
    u = b * y
    output = (D * (query @ key.T)) @ u + e * (query @ S)
    S = e[-1] * S + (D[-1] * key).T @ u

where what y needs with delta is found beforehand (:mod:`~recurl.recurrence.cuda.matrix.solve`), and so are the states
before pieces of rows (:mod:`~recurl.recurrence.cuda.matrix.pieces`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.cuda.matrix.parts import (
    at,
    clean,
    decays,
    dot,
    matrix,
    next_stored,
    poison,
    rows,
    segments,
    store_matrix,
    store_rows,
    stored_state,
)
from recurl.recurrence.cuda.parts import is_bad


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
    solved_key,
    output,
    solved,
    after,
    carried,
    arriving,
    heads,
    length,
    chunks,
    pieces,
    piece_chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_STATES: tl.constexpr,
    AFTER: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write outputs, states after segments, and what the backward pass reads; with DELTA ``value`` is y_value."""
    program = tl.program_id(0)
    block = program % BLOCKS
    head = ((program // BLOCKS) % heads).to(tl.int64)
    piece = (program // BLOCKS // heads) % pieces
    row = program // BLOCKS // heads // pieces
    k = tl.arange(0, BLOCK_K)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.arange(0, CHUNK)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    first_chunk = piece * piece_chunks
    if piece > 0:
        of_piece = (row.to(tl.int64) * (pieces - 1) + piece - 1) * heads + head
        state = matrix(arriving, of_piece * (K * V), V, 1, k, v, K, V)
    for chunk in range(first_chunk, tl.minimum(first_chunk + piece_chunks, chunks)):
        begin = row.to(tl.int64) * length + chunk * CHUNK
        last = tl.minimum(begin + CHUNK, (row.to(tl.int64) + 1) * length) - 1
        count = (last - begin).to(tl.int32)
        inside = t <= count
        segment = segments(start_index, begin, tl.minimum(t, count))
        last_segment = segments(start_index, begin, count)
        if tl.load(start_index + begin) == begin:
            state = stored_state(
                states, begin, head, states_token, states_head, states_key, states_value, spacing, k, v, K, V,
                HAS_STATES,
            )  # fmt: skip
        elif KEEP:
            slot = row.to(tl.int64) * (chunks - 1) + chunk - 1
            store_matrix(carried, (slot * heads + head) * (K * V), k, v, state, K, V)
        first = begin * heads + head
        elapsed = decays(log_decay + first, t * heads, inside, segment == t)
        b = tl.load(rate + first + t * heads, mask=inside, other=0.0)
        keys = rows(key + begin * key_token + head * key_head, t, key_token, k, inside, K).to(key.dtype.element_ty)
        y = rows(value + begin * value_token + head * value_head, t, value_token, v, inside, V)
        before = tl.zeros([CHUNK, BLOCK_V], tl.float32)  # y_key @ S
        if DELTA:
            reads = rows(solved_key + first * K, t, heads * K, k, inside, K)
            before = tl.where((segment == 0)[:, None], dot(reads, state, PRECISION), 0.0)
        queries = rows(query + begin * query_token + head * query_head, t, query_token, k, inside, K)
        result = tl.where((segment == 0)[:, None], dot(queries, state, PRECISION), 0.0)  # query @ S
        if HAS_STATES:
            start = next_stored(segment, 0, begin, spacing, CHUNK)
            while start < CHUNK:
                stored = stored_state(
                    states, begin + start, head, states_token, states_head, states_key, states_value, spacing, k, v, K,
                    V, HAS_STATES,
                )  # fmt: skip
                own = (segment == start)[:, None]
                if DELTA:
                    before = tl.where(own, dot(reads, stored, PRECISION), before)
                result = tl.where(own, dot(queries, stored, PRECISION), result)
                start = next_stored(segment, start, begin, spacing, CHUNK)
        if DELTA:
            y -= before
            if KEEP:
                store_rows(solved + first * V, t, heads * V, v, inside, y, V)
        u = b[:, None] * y
        bad = poison(u)
        if not DELTA:
            bad += poison(keys.to(tl.float32))
        if is_bad(bad):
            u = clean(u)
            keys = clean(keys.to(tl.float32)).to(key.dtype.element_ty)
        same = (segment[:, None] == segment[None, :]) & (t[:, None] >= t[None, :])
        between = tl.exp2(elapsed[:, None] - elapsed[None, :]) + bad[None, :]
        weights = tl.where(same, between * dot(queries, tl.trans(keys), PRECISION), 0.0)
        result = dot(weights, u, PRECISION) + tl.exp2(elapsed)[:, None] * result
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
                weight = tl.where(reached, tl.exp2(left - elapsed) + bad, 0.0)
                found = tl.exp2(left) * found + dot(tl.trans(keys), weight[:, None] * u, PRECISION)
                store_matrix(after, ((begin + end) * heads + head) * (K * V), k, v, found, K, V)
                end = tl.min(tl.where(ends & (t > end), t, CHUNK), 0)
        if last_segment > 0:
            state = stored_state(
                states, begin + last_segment, head, states_token, states_head, states_key, states_value, spacing, k, v,
                K, V, HAS_STATES,
            )  # fmt: skip
        left = at(elapsed, t, CHUNK - 1)
        weight = tl.where(segment == last_segment, tl.exp2(left - elapsed) + bad, 0.0)
        state = tl.exp2(left) * state + dot(tl.trans(keys), weight[:, None] * u, PRECISION)
        if AFTER:
            following = tl.minimum(last + 1, (row.to(tl.int64) + 1) * length - 1)
            if (last + 1 == (row.to(tl.int64) + 1) * length) | (tl.load(start_index + following) == last + 1):
                store_matrix(after, (last * heads + head) * (K * V), k, v, state, K, V)
