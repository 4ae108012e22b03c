# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, C901, PLR0912, PLR0913, PLR0915, SIM102
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments. An if on a constant is a statement because only one of its branches is compiled.
"""Backward pass of matrix recurrences, the last chunk of a row first.

In the notation of the forward pass, with G the gradient of the state after a chunk::

    du = (D * (query @ key.T)).T @ grad + D[-1] * (key @ G)
    du = du - X.T @ (b * du)  # with delta; from here on the gradient of value / b
    grad_value, grad_rate = b * du, (du * y).sum(1)
    P, Q = tril(D * (grad @ u.T)), -strict_tril(D * (grad_value @ u.T))
    grad_query = P @ key + e * (grad @ S.T)
    grad_key = P.T @ query + (Q + Q.T) @ key - e * (grad_value @ S.T) + D[-1] * (u @ G.T)
    G = e[-1] * G + (e * query).T @ grad - (e * key).T @ grad_value  # or - (b * y_key).T @ du, of du before X

without delta, Q and the other terms of grad_value in the last two lines are zero. The gradient of log_decay[i] is the
sum of all products that contain D[t, s] with s < i <= t, of those with e[t], i <= t, and of (S after the chunk) * G.
The products that contain D[t, s] or e[t], of one t or one s, are those of a query or key and a term of its gradient.
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
    reverse_sums,
    rows,
    segments,
    store_matrix,
    store_rows,
    stored_state,
    sums,
)
from recurl.recurrence.cuda.parts import is_bad


@triton.jit
def backward_kernel(
    query,
    query_token,
    query_head,
    key,
    key_token,
    key_head,
    solved,
    solved_token,
    solved_head,
    log_decay,
    rate,
    states,
    states_token,
    states_head,
    states_key,
    states_value,
    spacing,
    start_index,
    solvers,
    solved_key,
    carried,
    grad,
    grad_after,
    grad_after_token,
    grad_after_head,
    grad_after_key,
    grad_after_value,
    grad_carried,
    grad_query,
    grad_key,
    grad_value,
    grad_log_decay,
    grad_rate,
    grad_states,
    added,
    tokens,
    heads,
    length,
    chunks,
    pieces,
    first_piece,
    piece_chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_STATES: tl.constexpr,
    MAPS: tl.constexpr,
    AFTER: tl.constexpr,
    TO_STATES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients: of each block of V, those that are sums over V; or with MAPS what each piece adds to G.

    ``solved`` is y, value without delta.
    """
    SOLVE: tl.constexpr = "tf32" if PRECISION == "bf16" else PRECISION
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    block = program % BLOCKS
    head = ((program // BLOCKS) % heads).to(tl.int64)
    piece = (program // BLOCKS // heads) % (pieces - first_piece) + first_piece
    row = (program // BLOCKS // heads // (pieces - first_piece)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.arange(0, CHUNK)
    row_end = (row + 1) * length
    part = block.to(tl.int64) * tokens
    grad_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    first_chunk = piece * piece_chunks
    end_chunk = tl.minimum(first_chunk + piece_chunks, chunks)
    if MAPS:  # only the segment that reaches back to the piece before matters: chunks after it are passed over
        starts = start_index + row * length
        begin_piece = row * length + first_chunk * CHUNK
        while (end_chunk > first_chunk) & (tl.load(starts + (end_chunk - 1) * CHUNK) >= begin_piece):
            end_chunk -= 1
    elif piece + 1 < pieces:
        of_piece = (row * (pieces - 1) + piece) * heads + head
        grad_state = matrix(grad_carried, of_piece * (K * V), V, 1, k, v, K, V)
    for step in range(end_chunk - first_chunk):
        chunk = end_chunk - 1 - step
        begin = row * length + chunk * CHUNK
        last = tl.minimum(begin + CHUNK, row_end) - 1
        count = (last - begin).to(tl.int32)
        inside = t <= count
        segment = segments(start_index, begin, tl.minimum(t, count))
        last_segment = segments(start_index, begin, count)
        fresh = tl.load(start_index + begin) == begin
        ends = (t < count) & (segments(start_index, begin, tl.minimum(t + 1, count)) == t + 1)
        first = begin * heads + head
        summed = first + part * heads
        elapsed = decays(log_decay + first, t * heads, inside, segment == t)
        b = tl.load(rate + first + t * heads, mask=inside, other=0.0)
        queries = rows(query + begin * query_token + head * query_head, t, query_token, k, inside, K)
        keys = rows(key + begin * key_token + head * key_head, t, key_token, k, inside, K)
        grads = rows(grad + first * V, t, heads * V, v, inside, V)
        y = grads
        if DELTA and MAPS:
            reads = rows(solved_key + first * K, t, heads * K, k, inside, K)
        if not MAPS:
            y = rows(solved + begin * solved_token + head * solved_head, t, solved_token, v, inside, V)
        if AFTER:
            following = tl.minimum(last + 1, row_end - 1)
            if (last + 1 == row_end) | (tl.load(start_index + following) == last + 1):
                offset = last * grad_after_token + head * grad_after_head
                grad_state += matrix(grad_after, offset, grad_after_key, grad_after_value, k, v, K, V)
        # Tokens whose queries or gradients aren't finite spoil what their segment did up to them; keys and rates, what
        # it does from them on.
        bad_grad = tl.zeros([CHUNK], tl.float32)
        bad_key = b * 0.0
        if BLOCK_K == BLOCK_V:
            spoilt = is_bad(queries * 0.0 + keys * 0.0 + grads * 0.0 + y * 0.0 + b[:, None])
        else:
            spoilt = is_bad(queries * 0.0 + keys * 0.0 + b[:, None]) | is_bad(grads * 0.0 + y * 0.0)
        if spoilt:
            bad_grad = poison(queries) + poison(grads)
            bad_key += poison(keys)
            queries = clean(queries)
            keys = clean(keys)
            grads = clean(grads)
        queries = queries.to(query.dtype.element_ty)
        keys = keys.to(key.dtype.element_ty)
        grads = grads.to(grad.dtype.element_ty)
        decay = tl.exp2(elapsed)
        left = at(elapsed, t, CHUNK - 1)
        same = (segment[:, None] == segment[None, :]) & (t[:, None] >= t[None, :])
        below = same & (t[:, None] > t[None, :])
        carries = (segment == 0)[:, None]
        exits = (segment == last_segment)[:, None]
        exit_decay = tl.exp2(left - elapsed)[:, None]
        between = tl.exp2(elapsed[:, None] - elapsed[None, :])
        weights = tl.where(same, between * dot(queries, tl.trans(keys), PRECISION), 0.0)
        du = dot(tl.trans(weights), grads, PRECISION)
        if spoilt:
            du += (reverse_sums(bad_grad, ends) + bad_key)[:, None]
        du += tl.where(exits, exit_decay * dot(keys, grad_state, PRECISION), 0.0)
        if AFTER:
            end = tl.min(tl.where(ends, t, CHUNK), 0)
            while end < CHUNK:
                offset = (begin + end) * grad_after_token + head * grad_after_head
                to_end = matrix(grad_after, offset, grad_after_key, grad_after_value, k, v, K, V)
                reached = (segment == at(segment, t, end)) & (t <= end)
                weight = tl.exp2(at(elapsed, t, end) - elapsed)[:, None]
                du += tl.where(reached[:, None], weight * dot(keys, to_end, PRECISION), 0.0)
                end = tl.min(tl.where(ends & (t > end), t, CHUNK), 0)
        if DELTA and not MAPS:
            solver = rows(solvers + first * CHUNK, t, heads * CHUNK, t, inside, CHUNK)
            scaled = b[:, None] * du
            bad = b * 0.0
            if is_bad(scaled):
                bad = poison(scaled)
                du = clean(du)
                scaled = clean(scaled)
            du -= dot(tl.trans(tl.where(same, solver + bad[:, None], 0.0)), scaled, SOLVE)
        to_value = b[:, None] * du
        if not MAPS:
            if fresh:
                state = stored_state(
                    states, begin, head, states_token, states_head, states_key, states_value, spacing, k, v, K, V,
                    HAS_STATES,
                )  # fmt: skip
            else:
                slot = row * (chunks - 1) + chunk - 1
                state = matrix(carried, (slot * heads + head) * (K * V), V, 1, k, v, K, V)
            store_rows(grad_value + first * V, t, heads * V, v, inside, to_value, V)
            to_rate = tl.sum(du * y, 1)
            tl.store(grad_rate + summed + t * heads, to_rate, mask=inside)
            u = b[:, None] * y
            if spoilt:
                bad_key += poison(u)
                u = clean(u)
            to_key = tl.where(exits, exit_decay * dot(u, tl.trans(grad_state), PRECISION), 0.0)
            last_state = state
            if last_segment > 0:
                last_state = stored_state(
                    states, begin + last_segment, head, states_token, states_head, states_key, states_value,
                    spacing, k, v, K, V, HAS_STATES,
                )  # fmt: skip
            # What the state after the chunk, and those at ends inside it, contribute.
            exit_total = tl.exp2(left) * tl.sum(last_state * grad_state) + tl.sum(to_key * keys)
            to_decay = tl.where(t == CHUNK - 1, exit_total, 0.0)
        wanted = TO_STATES | (fresh == 0)  # the gradient of the state before the chunk
        to_state = tl.where((last_segment == 0) & wanted, tl.exp2(left) * grad_state, 0.0)
        if AFTER:
            end = tl.min(tl.where(ends, t, CHUNK), 0)
            while end < CHUNK:
                offset = (begin + end) * grad_after_token + head * grad_after_head
                to_end = matrix(grad_after, offset, grad_after_key, grad_after_value, k, v, K, V)
                origin = at(segment, t, end)
                end_decay = at(elapsed, t, end)
                if (origin == 0) & wanted:
                    to_state += tl.exp2(end_decay) * to_end
                if not MAPS:
                    end_state = state
                    if origin > 0:
                        end_state = stored_state(
                            states, begin + origin, head, states_token, states_head, states_key, states_value, spacing,
                            k, v, K, V, HAS_STATES,
                        )  # fmt: skip
                    reached = ((segment == origin) & (t <= end))[:, None]
                    weight = tl.exp2(end_decay - elapsed)[:, None]
                    more = tl.where(reached, weight * dot(u, tl.trans(to_end), PRECISION), 0.0)
                    to_key += more
                    end_total = tl.sum(more * keys) + tl.exp2(end_decay) * tl.sum(end_state * to_end)
                    to_decay += tl.where(t == end, end_total, 0.0)
                end = tl.min(tl.where(ends & (t > end), t, CHUNK), 0)
        if not MAPS:
            to_query = tl.where(carries, dot(grads, tl.trans(state), PRECISION), 0.0)
            to_before = tl.zeros([CHUNK, BLOCK_K], tl.float32)
            if DELTA:
                to_before = tl.where(carries, dot(to_value, tl.trans(state), PRECISION), 0.0)
            if HAS_STATES:
                start = next_stored(segment, 0, begin, spacing, CHUNK)
                while start < CHUNK:
                    own = (segment == start)[:, None]
                    stored = stored_state(
                        states, begin + start, head, states_token, states_head, states_key, states_value, spacing, k, v,
                        K, V, HAS_STATES,
                    )  # fmt: skip
                    to_query = tl.where(own, dot(grads, tl.trans(stored), PRECISION), to_query)
                    if DELTA:
                        to_before = tl.where(own, dot(to_value, tl.trans(stored), PRECISION), to_before)
                    if TO_STATES:
                        weighted = tl.where(own, (decay + bad_grad)[:, None] * queries, 0.0)
                        to_stored = dot(tl.trans(weighted), grads, PRECISION)
                        if DELTA:
                            weighted = tl.where(own, decay[:, None] * keys, 0.0)
                            own_value = tl.where(own, to_value, 0.0)
                            to_stored -= dot(tl.trans(weighted), own_value, PRECISION)
                        if start == last_segment:
                            to_stored += tl.exp2(left) * grad_state
                        elif AFTER:
                            end = tl.max(tl.where(segment == start, t, 0), 0)
                            offset = (begin + end) * grad_after_token + head * grad_after_head
                            to_end = matrix(grad_after, offset, grad_after_key, grad_after_value, k, v, K, V)
                            to_stored += tl.exp2(at(elapsed, t, end)) * to_end
                        store_matrix(grad_states, ((begin + start) * heads + head) * (K * V), k, v, to_stored, K, V)
                    start = next_stored(segment, start, begin, spacing, CHUNK)
            inner = tl.where(same, between * dot(grads, tl.trans(u), PRECISION), 0.0)
            # Products of a token with itself don't decay: left in by_decay, they would cancel but for rounding errors.
            diagonal = tl.sum(tl.where(below, 0.0, inner), 1)[:, None]
            inner = tl.where(below, inner, 0.0)
            to_query = decay[:, None] * to_query + dot(inner, keys, PRECISION)
            to_key += dot(tl.trans(inner), queries, PRECISION)
            by_decay = queries * to_query - keys * to_key
            to_query += diagonal * keys
            to_key += diagonal * queries
            if DELTA:
                pairs = tl.where(below, between * dot(to_value, tl.trans(u), PRECISION), 0.0)
                to_before = decay[:, None] * to_before + dot(pairs, keys, PRECISION)
                to_later = dot(tl.trans(pairs), keys, PRECISION)
                by_decay += keys * (to_later - to_before)
                to_key -= to_before + to_later
            to_decay = reverse_sums(to_decay + tl.sum(by_decay, 1), ends)
            if spoilt:
                earlier, later = reverse_sums(bad_grad, ends), sums(bad_key, segment == t)
                to_query += (bad_grad + later)[:, None]
                to_key += (earlier + (later if DELTA else bad_key))[:, None]
                to_decay += earlier + later
            store_rows(grad_query + summed * K, t, heads * K, k, inside, to_query, K)
            store_rows(grad_key + summed * K, t, heads * K, k, inside, to_key, K)
            tl.store(grad_log_decay + summed + t * heads, to_decay, mask=inside)
        leaving = carries & wanted
        weighted = tl.where(leaving, (decay + bad_grad)[:, None] * queries, 0.0)
        to_state += dot(tl.trans(weighted), grads, PRECISION)
        if DELTA:
            if MAPS:
                weighted = tl.where(leaving, b[:, None] * reads, 0.0)
                to_state -= dot(tl.trans(weighted), tl.where(leaving, du, 0.0), PRECISION)
            else:
                weighted = tl.where(leaving, decay[:, None] * keys, 0.0)
                to_state -= dot(tl.trans(weighted), tl.where(leaving, to_value, 0.0), PRECISION)
        grad_state = to_state
        if TO_STATES and not MAPS:
            if fresh:
                store_matrix(grad_states, (begin * heads + head) * (K * V), k, v, to_state, K, V)
                grad_state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if MAPS:
        of_piece = (row * (pieces - 1) + piece - 1) * heads + head
        store_matrix(added, of_piece * (K * V), k, v, grad_state, K, V)
