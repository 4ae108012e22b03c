# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Attention of the first tokens of segments to stored windows, added to the attention to the stream.

A stored input x has the key ``K x``, so that ``query (K x) = (query K) x``: a program maps the queries of a tile of
tokens and one head, and walks over the windows of the segments that these tokens belong to, of which only those with
inputs are read. As in the stream, the inputs of a tile stand last to first. Programs without any leave at once. The
last number of an input, which tells whether there is one, is taken out of the products, so that a width of 2^n + 1
isn't padded to 2^(n + 1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.cuda.attention.kernels import _LOG2E, any_in_rows, at_rows, not_finite


@triton.jit
def _next_segment(reads, first, segment, tokens):
    """Return the first token of the next segment with tokens that read, or the number of tokens."""
    return tl.min(tl.where(reads & (first > segment), first, tokens), 0)


@triton.jit
def _has_inputs(
    windows,
    token_stride,
    place_stride,
    spacing,
    reads,
    first,
    tokens,
    PAST: tl.constexpr,
    PAST_PADDED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return whether any of the windows holds an input."""
    place = tl.arange(0, PAST_PADDED)
    found = 0
    segment = _next_segment(reads, first, -1, tokens)
    while segment < tokens:
        at = windows + (segment // spacing).to(tl.int64) * token_stride + place * place_stride + WIDE
        flags = tl.load(at, mask=place < PAST, other=0.0)
        found = tl.maximum(found, tl.max((flags > 0).to(tl.int32), 0))
        segment = _next_segment(reads, first, segment, tokens)
    return found


@triton.jit
def _stored(windows, token_stride, place_stride, spacing, segment, place, e, PAST: tl.constexpr, WIDE: tl.constexpr):
    """Return stored inputs without their last numbers, these, and which are there, and which aren't finite."""
    window = windows + (segment // spacing).to(tl.int64) * token_stride
    at = place * place_stride
    flag = tl.load(window + at + WIDE, mask=place < PAST, other=0.0)
    there = flag > 0
    x = tl.load(window + (at[:, None] + e[None, :]), mask=there[:, None] & (e < WIDE)[None, :], other=0.0)
    broken = any_in_rows(not_finite(x)) | not_finite(flag)
    x = tl.where(broken[:, None], 0.0, x)
    return x, tl.where(there & (broken == 0), flag, 0.0).to(tl.float32), there, broken


@triton.jit
def _map(weight, head, d, e, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Return rows of a map to the heads, without the last column, and this."""
    at = (head * WIDTH + d) * (WIDE + 1)
    inside = (d < WIDTH)[:, None] & (e < WIDE)[None, :]
    found = tl.load(weight + (at[:, None] + e[None, :]), mask=inside, other=0.0)
    return found, tl.load(weight + at + WIDE, mask=d < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _mapped(
    values,
    weight,
    top,
    row,
    head,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_PADDED: tl.constexpr,
    READERS: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the products of rows of a head and a map, without the last column, and this, in pieces of the rows."""
    e = tl.arange(0, WIDE_PADDED)
    found = tl.zeros([READERS, WIDE_PADDED], tl.float32)
    constant = tl.zeros([READERS], tl.float32)
    for begin in range(0, WIDTH, PIECE):
        d = begin + tl.arange(0, PIECE)
        base, at, inside = at_rows(top, row, head, d, tokens, HEADS, WIDTH)
        x = tl.load(values + base + at, mask=inside, other=0.0)
        part, last = _map(weight, head, d, e, WIDTH, WIDE)
        found += tl.dot(x, part, input_precision=PRECISION)
        constant += tl.sum(x.to(tl.float32) * last[None, :], 1)
    return found.to(values.dtype.element_ty), constant


@triton.jit
def _add_mapped_back(
    to,
    wide,
    constant,
    weight,
    share,
    spoilt,
    reads,
    top,
    row,
    head,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_PADDED: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Replace rows of a head by ``share`` of them, plus the product of the map and wide rows; NaN where spoilt."""
    e = tl.arange(0, WIDE_PADDED)
    wide = wide.to(to.dtype.element_ty)
    for begin in range(0, WIDTH, PIECE):
        d = begin + tl.arange(0, PIECE)
        base, at, inside = at_rows(top, row, head, d, tokens, HEADS, WIDTH)
        part, last = _map(weight, head, d, e, WIDTH, WIDE)
        found = tl.dot(wide, tl.trans(part), input_precision=PRECISION) + constant[:, None] * last[None, :]
        found += tl.load(to + base + at, mask=inside, other=0.0).to(tl.float32) * share[:, None]
        found = tl.where(spoilt[:, None], float("nan"), found)
        tl.store(to + base + at, found.to(to.dtype.element_ty), mask=inside & reads[:, None])


@triton.jit
def _read(
    query,
    position,
    top,
    row,
    first,
    reads,
    windows,
    token_stride,
    place_stride,
    spacing,
    to_key,
    to_value,
    result,
    totals,
    head,
    tokens,
    HEADS: tl.constexpr,
    PAST: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_PADDED: tl.constexpr,
    READERS: tl.constexpr,
    STORED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the windows hold to the result."""
    e = tl.arange(0, WIDE_PADDED)
    readers, constant = _mapped(
        query, to_key, top, row, head, tokens, HEADS, WIDTH, WIDE, WIDE_PADDED, READERS, PIECE, PRECISION
    )
    age = row - first
    c = tl.arange(0, STORED)
    places = (top.to(tl.int64) * HEADS + head) * (PAST + 1)
    line = (row - top) * (HEADS * (PAST + 1))
    best = tl.full([READERS], float("-inf"), tl.float32)
    total = tl.zeros([READERS], tl.float32)
    flags = tl.zeros([READERS], tl.float32)
    sums = tl.zeros([READERS, WIDE_PADDED], tl.float32)
    tainted = tl.zeros([READERS], tl.int32)
    segment = _next_segment(reads, first, -1, tokens)
    while segment < tokens:
        mine = reads & (first == segment)
        for begin in range(0, PAST, STORED):
            place = begin + STORED - 1 - c
            x, flag, there, broken = _stored(
                windows, token_stride, place_stride, spacing, segment, place, e, PAST, WIDE
            )
            distance = (age + (PAST - begin - STORED + 1))[:, None] + c[None, :]
            allowed = mine[:, None] & there[None, :] & (distance <= PAST)
            tainted = tl.maximum(tainted, tl.max((allowed & broken[None, :]).to(tl.int32), 1))
            allowed = allowed & (broken[None, :] == 0)
            place_at = line[:, None] + distance
            score = tl.dot(readers, tl.trans(x), input_precision=PRECISION) + constant[:, None] * flag[None, :]
            score += tl.load(position + places + place_at, mask=allowed, other=0.0).to(tl.float32)
            score = tl.where(allowed, score * _LOG2E, float("-inf"))
            largest = tl.maximum(best, tl.max(score, 1))
            shift = tl.where(largest == float("-inf"), 0.0, largest)
            weights = tl.exp2(score - shift[:, None])
            rescale = tl.exp2(best - shift)
            total = total * rescale + tl.sum(weights, 1)
            flags = flags * rescale + tl.sum(weights * flag[None, :], 1)
            sums = sums * rescale[:, None] + tl.dot(weights.to(x.dtype), x, input_precision=PRECISION)
            best = largest
        segment = _next_segment(reads, first, segment, tokens)
    total_at = totals + row * HEADS + head
    own = tl.load(total_at, mask=row < tokens, other=0.0)
    more = tl.where(total > 0, best + tl.log2(total), float("-inf"))
    largest = tl.maximum(own, more)
    both = largest + tl.log2(tl.exp2(own - largest) + tl.exp2(more - largest))
    share = tl.where(best == float("-inf"), 0.0, tl.exp2(best - both))
    _add_mapped_back(
        result, sums * share[:, None], flags * share, to_value, tl.exp2(own - both), tainted != 0, reads, top, row,
        head, tokens, HEADS, WIDTH, WIDE, WIDE_PADDED, PIECE, PRECISION,
    )  # fmt: skip
    tl.store(total_at, both, mask=reads)


@triton.jit
def read_kernel(
    query,
    position,
    start,
    windows,
    token_stride,
    place_stride,
    spacing,
    to_key,
    to_value,
    result,
    totals,
    tokens,
    HEADS: tl.constexpr,
    PAST: tl.constexpr,
    PAST_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_PADDED: tl.constexpr,
    READERS: tl.constexpr,
    STORED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add attention to stored windows to the result and the sums of exponentials of the stream's kernel."""
    head = tl.program_id(1)
    row = tl.program_id(0) * READERS + tl.arange(0, READERS)
    first = tl.load(start + row, mask=row < tokens, other=0).to(tl.int32)
    reads = (row < tokens) & (row - first < PAST) & (first % spacing == 0)
    if _has_inputs(windows, token_stride, place_stride, spacing, reads, first, tokens, PAST, PAST_PADDED, WIDE) != 0:
        _read(
            query, position, tl.program_id(0) * READERS, row, first, reads, windows, token_stride, place_stride,
            spacing, to_key, to_value, result, totals, head, tokens, HEADS, PAST, WIDTH, PIECE, WIDE, WIDE_PADDED,
            READERS, STORED, PRECISION,
        )  # fmt: skip


@triton.jit
def _read_backward(
    query,
    position,
    top,
    row,
    first,
    reads,
    windows,
    token_stride,
    place_stride,
    spacing,
    to_key,
    to_value,
    totals,
    grads,
    deltas,
    to_query,
    to_position,
    to_readers,
    sums_of,
    head,
    tokens,
    HEADS: tl.constexpr,
    PAST: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_PADDED: tl.constexpr,
    SPAN: tl.constexpr,
    READERS: tl.constexpr,
    STORED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add to the gradients what flows through the windows."""
    e = tl.arange(0, WIDE_PADDED)
    readers, constant = _mapped(
        query, to_key, top, row, head, tokens, HEADS, WIDTH, WIDE, WIDE_PADDED, READERS, PIECE, PRECISION
    )
    mapped, mapped_constant = _mapped(
        grads, to_value, top, row, head, tokens, HEADS, WIDTH, WIDE, WIDE_PADDED, READERS, PIECE, PRECISION
    )
    total = tl.load(totals + row * HEADS + head, mask=row < tokens, other=0.0)
    delta = tl.load(deltas + row * HEADS + head, mask=row < tokens, other=0.0)
    age = row - first
    c = tl.arange(0, STORED)
    places = (top.to(tl.int64) * HEADS + head) * (PAST + 1)
    line = (row - top) * (HEADS * (PAST + 1))
    to_reader = tl.zeros([READERS, WIDE_PADDED], tl.float32)
    to_constant = tl.zeros([READERS], tl.float32)
    sums = tl.zeros([READERS, WIDE_PADDED], tl.float32)
    flags = tl.zeros([READERS], tl.float32)
    segment = _next_segment(reads, first, -1, tokens)
    while segment < tokens:
        mine = reads & (first == segment)
        for begin in range(0, PAST, STORED):
            place = begin + STORED - 1 - c
            x, flag, there, _ = _stored(windows, token_stride, place_stride, spacing, segment, place, e, PAST, WIDE)
            distance = (age + (PAST - begin - STORED + 1))[:, None] + c[None, :]
            allowed = mine[:, None] & there[None, :] & (distance <= PAST)
            place_at = line[:, None] + distance
            score = tl.dot(readers, tl.trans(x), input_precision=PRECISION) + constant[:, None] * flag[None, :]
            score += tl.load(position + places + place_at, mask=allowed, other=0.0).to(tl.float32)
            weights = tl.where(allowed, tl.exp2(score * _LOG2E - total[:, None]), 0.0)
            towards = tl.dot(mapped, tl.trans(x), input_precision=PRECISION) + mapped_constant[:, None] * flag[None, :]
            to_score = tl.where(allowed, weights * (towards - delta[:, None]), 0.0)
            tl.store(to_position + places + place_at, to_score.to(to_position.dtype.element_ty), mask=allowed)
            to_reader += tl.dot(to_score.to(x.dtype), x, input_precision=PRECISION)
            to_constant += tl.sum(to_score * flag[None, :], 1)
            sums += tl.dot(weights.to(x.dtype), x, input_precision=PRECISION)
            flags += tl.sum(weights * flag[None, :], 1)
        segment = _next_segment(reads, first, segment, tokens)
    whole = tl.full([READERS], 1.0, tl.float32)
    _add_mapped_back(
        to_query, to_reader, to_constant, to_key, whole, whole == 0, reads, top, row,
        head, tokens, HEADS, WIDTH, WIDE, WIDE_PADDED, PIECE, PRECISION,
    )  # fmt: skip
    to_readers += (top.to(tl.int64) * HEADS + head) * SPAN
    sums_of += (top.to(tl.int64) * HEADS + head) * SPAN
    wide_at = (row - top) * (HEADS * SPAN)
    wide = reads[:, None] & (e < WIDE)[None, :]
    tl.store(to_readers + (wide_at[:, None] + e[None, :]), to_reader.to(to_readers.dtype.element_ty), mask=wide)
    tl.store(to_readers + wide_at + WIDE, to_constant.to(to_readers.dtype.element_ty), mask=reads)
    tl.store(sums_of + (wide_at[:, None] + e[None, :]), sums.to(sums_of.dtype.element_ty), mask=wide)
    tl.store(sums_of + wide_at + WIDE, flags.to(sums_of.dtype.element_ty), mask=reads)


@triton.jit
def read_backward_kernel(
    query,
    position,
    start,
    windows,
    token_stride,
    place_stride,
    spacing,
    to_key,
    to_value,
    totals,
    grads,
    deltas,
    to_query,
    to_position,
    to_readers,
    sums,
    tokens,
    HEADS: tl.constexpr,
    PAST: tl.constexpr,
    PAST_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_PADDED: tl.constexpr,
    SPAN: tl.constexpr,
    READERS: tl.constexpr,
    STORED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add to the gradients of queries and positions; write those of mapped queries, and weighted sums of inputs.

    The last two, ``[N, heads, SPAN]``, hold zeros before, and then what the gradients of the maps are products of.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * READERS + tl.arange(0, READERS)
    first = tl.load(start + row, mask=row < tokens, other=0).to(tl.int32)
    reads = (row < tokens) & (row - first < PAST) & (first % spacing == 0)
    if _has_inputs(windows, token_stride, place_stride, spacing, reads, first, tokens, PAST, PAST_PADDED, WIDE) != 0:
        _read_backward(
            query, position, tl.program_id(0) * READERS, row, first, reads, windows, token_stride, place_stride,
            spacing, to_key, to_value, totals, grads, deltas, to_query, to_position, to_readers, sums, head, tokens,
            HEADS, PAST, WIDTH, PIECE, WIDE, WIDE_PADDED, SPAN, READERS, STORED, PRECISION,
        )  # fmt: skip
