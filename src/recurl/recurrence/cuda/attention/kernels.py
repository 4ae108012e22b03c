# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Attention of a stream of tokens to itself: a token's keys are those of its segment at most WINDOW tokens back.

A program holds the queries of a tile of tokens and one head (or keys, for their gradients), and walks over the tiles of
keys (queries) that lie within the window, with a softmax whose largest score grows on the way. Nothing depends on where
segments start, except which pairs count, and where the walk may end early. The keys of a tile stand last to first:
along them distances grow by one, as do the addresses of the scores of distances, so that loads and stores of these are
coalesced.

Products are taken of all pairs of a tile. What isn't finite is 0 times NaN for pairs that don't count, so that sums
that should be finite aren't. If a program's sums aren't finite, it walks again, careful: what isn't finite is taken out
of the products, and put where it belongs afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.cuda.parts import is_bad

LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def not_finite(x):
    """Return which numbers aren't finite."""
    return (x != x) | (tl.abs(x) == float("inf"))


@triton.jit
def any_in_rows(x):
    """Return which rows have a number that isn't zero."""
    return tl.max(x.to(tl.int32), 1) != 0


@triton.jit
def at_rows(begin, row, head, d, tokens, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offset of a tile, and of its numbers in it ``[rows, D]`` (in 32 bits), and which exist.

    Args:
        begin: the first row.
        row: the rows.
        head: the head.
        d: the numbers of a row.
        tokens: number of rows.
        HEADS: number of heads.
        WIDTH: numbers of a row.
    """
    offset = (row - begin)[:, None] * (HEADS * WIDTH) + d[None, :]
    return (tl.full([], begin, tl.int64) * HEADS + head) * WIDTH, offset, (row < tokens)[:, None] & (d < WIDTH)[None, :]


@triton.jit
def _reach(row, first, tokens, WINDOW: tl.constexpr):
    """Return how far back the keys of each token reach; -1 for rows after the last token."""
    return tl.where(row < tokens, tl.minimum(row - first, WINDOW), -1)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _limit(key, end, flags, tokens, WINDOW: tl.constexpr):
    """Return the distance to the last token that attends to each key, at most WINDOW; negative without a token.

    Args:
        key: the keys, last to first.
        end: the first start of a segment after the next token, or the number of tokens if that is smaller.
        flags: starts of segments.
        tokens: number of tokens.
        WINDOW: distance of the last key that a token may attend to.
    """
    later = key + 1
    starts = tl.load(flags + later, mask=later < tokens, other=0)
    next_start = tl.associative_scan(tl.where(starts != 0, later, end), 0, _smaller)
    return tl.minimum(next_start - later, WINDOW)


@triton.jit
def _within(distance, reach):
    """Return which distances are at least 0 and at most ``reach``."""
    return (distance >= 0) & (distance <= reach)


@triton.jit
def _places(top, row, head, HEADS: tl.constexpr, WINDOW: tl.constexpr):
    """Return the offset of the positions of a tile's tokens, and of each token's in them; ``top`` is the first row."""
    return (tl.full([], top, tl.int64) * HEADS + head) * (WINDOW + 1), (row - top) * (HEADS * (WINDOW + 1))


@triton.jit
def _walk_forward(
    q,
    key,
    value,
    position,
    top,
    row,
    reach,
    head,
    low,
    high,
    tokens,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Return the largest score, the sum of exponentials, the sums of values, and which tokens aren't finite."""
    c = tl.arange(0, KEYS)
    d = tl.arange(0, PADDED)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, PADDED], tl.float32)
    tainted = tl.zeros([QUERIES], tl.int32)
    place_base, place = _places(top, row, head, HEADS, WINDOW)
    for begin in range(low, high, KEYS):
        base, at, inside = at_rows(begin, begin + KEYS - 1 - c, head, d, tokens, HEADS, WIDTH)
        k = tl.load(key + base + at, mask=inside, other=0.0)
        v = tl.load(value + base + at, mask=inside, other=0.0)
        distance = (row - (begin + KEYS - 1))[:, None] + c[None, :]
        allowed = _within(distance, reach[:, None])
        if CAREFUL:
            broken = any_in_rows(not_finite(k)) | any_in_rows(not_finite(v))
            tainted = tl.maximum(tainted, tl.max((allowed & broken[None, :]).to(tl.int32), 1))
            k = tl.where(broken[:, None], 0.0, k)
            v = tl.where(broken[:, None], 0.0, v)
            allowed = allowed & (broken[None, :] == 0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        place_of = position + (place_base + top - (begin + KEYS - 1))  # one address, and offsets that don't change
        at = (place + row - top)[:, None] + c[None, :]
        score += tl.load(place_of + at, mask=allowed, other=0.0).to(tl.float32)
        score = tl.where(allowed, score * _LOG2E, float("-inf"))
        largest = tl.maximum(best, tl.max(score, 1))
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(score - shift[:, None])
        rescale = tl.exp2(best - shift)
        total = total * rescale + tl.sum(weights, 1)
        sums = sums * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = largest
    return best, total, sums, tainted


@triton.jit
def forward_kernel(
    query,
    key,
    value,
    position,
    start,
    result,
    totals,
    tokens,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the result, and the logarithms (base 2) of the sums of exponentials, ``[N, heads]``."""
    head = tl.program_id(1)
    begin = tl.program_id(0) * QUERIES
    row = begin + tl.arange(0, QUERIES)
    d = tl.arange(0, PADDED)
    reach = _reach(row, tl.load(start + row, mask=row < tokens, other=0).to(tl.int32), tokens, WINDOW)
    base, at, inside = at_rows(begin, row, head, d, tokens, HEADS, WIDTH)
    q = tl.load(query + base + at, mask=inside, other=0.0)
    low = tl.maximum(tl.maximum(begin - WINDOW, 0), tl.load(start + begin).to(tl.int32)) // KEYS * KEYS
    high = tl.minimum(begin + QUERIES, tokens)
    given = q, key, value, position, begin, row, reach, head, low, high, tokens
    best, total, sums, tainted = _walk_forward(*given, HEADS, WINDOW, WIDTH, PADDED, QUERIES, KEYS, PRECISION, False)
    if is_bad(sums):
        best, total, sums, tainted = _walk_forward(*given, HEADS, WINDOW, WIDTH, PADDED, QUERIES, KEYS, PRECISION, True)
    found = tl.where((tainted != 0)[:, None], float("nan"), sums / total[:, None])
    tl.store(result + base + at, found.to(result.dtype.element_ty), mask=inside)
    tl.store(totals + row * HEADS + head, best + tl.log2(total), mask=row < tokens)


@triton.jit
def _walk_queries(
    q,
    grad,
    total,
    delta,
    key,
    value,
    position,
    to_position,
    top,
    row,
    reach,
    head,
    low,
    high,
    tokens,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Return the gradients of queries; write those of positions."""
    c = tl.arange(0, KEYS)
    d = tl.arange(0, PADDED)
    to_query = tl.zeros([QUERIES, PADDED], tl.float32)
    place_base, place = _places(top, row, head, HEADS, WINDOW)
    for begin in range(low, high, KEYS):
        base, at, inside = at_rows(begin, begin + KEYS - 1 - c, head, d, tokens, HEADS, WIDTH)
        k = tl.load(key + base + at, mask=inside, other=0.0)
        v = tl.load(value + base + at, mask=inside, other=0.0)
        distance = (row - (begin + KEYS - 1))[:, None] + c[None, :]
        allowed = _within(distance, reach[:, None])
        if CAREFUL:
            broken = any_in_rows(not_finite(k)) | any_in_rows(not_finite(v))
            k = tl.where(broken[:, None], 0.0, k)
            v = tl.where(broken[:, None], 0.0, v)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        at = place[:, None] + distance
        score += tl.load(position + place_base + at, mask=allowed, other=0.0).to(tl.float32)
        towards = tl.dot(
            grad, tl.trans(v), tl.broadcast_to(-delta[:, None], [QUERIES, KEYS]), input_precision=PRECISION
        )
        weights = tl.exp2(score * _LOG2E - total[:, None])
        to_score = tl.where(allowed, weights * towards, 0.0)
        tl.store(to_position + place_base + at, to_score.to(to_position.dtype.element_ty), mask=allowed)
        to_query += tl.dot(to_score.to(k.dtype), k, input_precision=PRECISION)
    return to_query


@triton.jit
def queries_kernel(
    query,
    key,
    value,
    position,
    start,
    result,
    totals,
    grads,
    to_query,
    to_position,
    deltas,
    tokens,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients of queries and positions, and the products of results and their gradients, ``[N, heads]``."""
    head = tl.program_id(1)
    begin = tl.program_id(0) * QUERIES
    row = begin + tl.arange(0, QUERIES)
    d = tl.arange(0, PADDED)
    reach = _reach(row, tl.load(start + row, mask=row < tokens, other=0).to(tl.int32), tokens, WINDOW)
    base, at, inside = at_rows(begin, row, head, d, tokens, HEADS, WIDTH)
    q = tl.load(query + base + at, mask=inside, other=0.0)
    grad = tl.load(grads + base + at, mask=inside, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * tl.load(result + base + at, mask=inside, other=0.0).to(tl.float32), 1)
    total = tl.load(totals + row * HEADS + head, mask=row < tokens, other=0.0)
    tl.store(deltas + row * HEADS + head, delta, mask=row < tokens)
    low = tl.maximum(tl.maximum(begin - WINDOW, 0), tl.load(start + begin).to(tl.int32)) // KEYS * KEYS
    high = tl.minimum(begin + QUERIES, tokens)
    place_base, place = _places(begin, row, head, HEADS, WINDOW)
    beyond = tl.where(row < tokens, reach, WINDOW) + 1  # distances without a key
    zeros = tl.zeros([QUERIES, KEYS], to_position.dtype.element_ty)
    for first in range(tl.min(beyond, 0), WINDOW + 1, KEYS):
        distance = first + tl.arange(0, KEYS)[None, :]
        without = (distance >= beyond[:, None]) & (distance <= WINDOW)
        tl.store(to_position + place_base + place[:, None] + distance, zeros, mask=without)
    given = q, grad, total, delta, key, value, position, to_position, begin, row, reach, head, low, high, tokens
    found = _walk_queries(*given, HEADS, WINDOW, WIDTH, PADDED, QUERIES, KEYS, PRECISION, False)
    if is_bad(found):
        found = _walk_queries(*given, HEADS, WINDOW, WIDTH, PADDED, QUERIES, KEYS, PRECISION, True)
    tl.store(to_query + base + at, found.to(to_query.dtype.element_ty), mask=inside)


@triton.jit
def _walk_keys(
    k,
    v,
    limit,
    query,
    position,
    totals,
    grads,
    deltas,
    last,
    c,
    head,
    low,
    high,
    tokens,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Return the gradients of keys and values, and which of them aren't finite."""
    d = tl.arange(0, PADDED)
    to_key = tl.zeros([KEYS, PADDED], tl.float32)
    to_value = tl.zeros([KEYS, PADDED], tl.float32)
    touched = tl.zeros([KEYS], tl.int32)
    for begin in range(low, high, QUERIES):
        row = begin + tl.arange(0, QUERIES)
        there = row < tokens
        base, at, inside = at_rows(begin, row, head, d, tokens, HEADS, WIDTH)
        q = tl.load(query + base + at, mask=inside, other=0.0)
        grad = tl.load(grads + base + at, mask=inside, other=0.0)
        total = tl.load(totals + row * HEADS + head, mask=there, other=0.0)
        delta = tl.load(deltas + row * HEADS + head, mask=there, other=0.0)
        distance = (row - last)[None, :] + c[:, None]
        allowed = _within(distance, limit[:, None])
        if CAREFUL:
            sick = not_finite(delta)
            touched = tl.maximum(touched, tl.max((allowed & sick[None, :]).to(tl.int32), 1))
            q = tl.where(sick[:, None], 0.0, q)
            grad = tl.where(sick[:, None], 0.0, grad)
            allowed = allowed & (sick[None, :] == 0)
        score = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        place_base, place = _places(begin, row, head, HEADS, WINDOW)
        place_of = position + (place_base + begin - last)
        at = (place + row - begin)[None, :] + c[:, None]
        score += tl.load(place_of + at, mask=allowed, other=0.0).to(tl.float32)
        weights = tl.where(allowed, tl.exp2(score * _LOG2E - total[None, :]), 0.0)
        to_value += tl.dot(weights.to(grad.dtype), grad, input_precision=PRECISION)
        towards = tl.dot(
            v, tl.trans(grad), tl.broadcast_to(-delta[None, :], [KEYS, QUERIES]), input_precision=PRECISION
        )
        to_score = tl.where(allowed, weights * towards, 0.0)
        to_key += tl.dot(to_score.to(q.dtype), q, input_precision=PRECISION)
    return to_key, to_value, touched


@triton.jit
def keys_kernel(
    query,
    key,
    value,
    position,
    flags,
    totals,
    grads,
    deltas,
    to_key,
    to_value,
    tokens,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients of keys and values."""
    head = tl.program_id(1)
    begin = tl.program_id(0) * KEYS
    c = tl.arange(0, KEYS)
    last = begin + KEYS - 1
    d = tl.arange(0, PADDED)
    base, at, inside = at_rows(begin, last - c, head, d, tokens, HEADS, WIDTH)
    k = tl.load(key + base + at, mask=inside, other=0.0)
    v = tl.load(value + base + at, mask=inside, other=0.0)
    low = begin // QUERIES * QUERIES
    high = tl.minimum(begin + KEYS + WINDOW, tokens)
    later = begin + KEYS + tl.arange(0, WINDOW_PADDED)  # the walk ends where the last key's segment does
    starts = tl.load(flags + later, mask=later < tokens, other=0)
    end = tl.min(tl.where(starts != 0, later, tokens), 0)
    limit = _limit(last - c, end, flags, tokens, WINDOW)
    high = tl.minimum(high, end)
    given = k, v, limit, query, position, totals, grads, deltas, last, c, head, low, high, tokens
    found, other, touched = _walk_keys(*given, HEADS, WINDOW, WIDTH, PADDED, QUERIES, KEYS, PRECISION, False)
    if is_bad(found) | is_bad(other):
        found, other, touched = _walk_keys(*given, HEADS, WINDOW, WIDTH, PADDED, QUERIES, KEYS, PRECISION, True)
    sick = (touched != 0)[:, None]
    tl.store(to_key + base + at, tl.where(sick, float("nan"), found).to(to_key.dtype.element_ty), mask=inside)
    tl.store(to_value + base + at, tl.where(sick, float("nan"), other).to(to_value.dtype.element_ty), mask=inside)
