# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, PLR0913, PLR0915
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Attention in one step of every row, as in an environment: each row reads its window once, and writes the next."""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.cuda.attention.kernels import _LOG2E


@triton.jit
def step_kernel(
    query,
    key,
    readers,
    position,
    windows,
    token_stride,
    place_stride,
    inputs,
    own_weights,
    sums_of,
    after,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    PAST: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_PADDED: tl.constexpr,
    STORED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the weights of the own inputs ``[R, heads]``, the weighted sums of windows, and the next windows."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PADDED)
    d = tl.arange(0, PADDED)
    e = tl.arange(0, WIDE_PADDED)
    exists = head < HEADS
    line = row * HEADS + head
    own_at = line[:, None] * WIDTH + d[None, :]
    own_mask = exists[:, None] & (d < WIDTH)[None, :]
    q = tl.load(query + own_at, mask=own_mask, other=0.0).to(tl.float32)
    own = tl.sum(q * tl.load(key + own_at, mask=own_mask, other=0.0).to(tl.float32), 1)
    own += tl.load(position + line * (PAST + 1), mask=exists, other=0.0).to(tl.float32)
    own = own * _LOG2E
    wide_at = line[:, None] * (WIDE + 1) + e[None, :]
    wide = exists[:, None] & (e < WIDE)[None, :]
    reader = tl.load(readers + wide_at, mask=wide, other=0.0)
    constant = tl.load(readers + line * (WIDE + 1) + WIDE, mask=exists, other=0.0).to(tl.float32)
    best = own
    total = tl.full([HEADS_PADDED], 1.0, tl.float32)
    flags = tl.zeros([HEADS_PADDED], tl.float32)
    sums = tl.zeros([HEADS_PADDED, WIDE_PADDED], tl.float32)
    window = windows + row * token_stride
    kept_at = after + row * PAST * (WIDE + 1)
    for begin in range(0, PAST, STORED):
        place = begin + tl.arange(0, STORED)
        at = place * place_stride
        flag = tl.load(window + at + WIDE, mask=place < PAST, other=0.0)
        there = flag > 0
        x = tl.load(window + (at[:, None] + e[None, :]), mask=there[:, None] & (e < WIDE)[None, :], other=0.0)
        to = (place - 1) * (WIDE + 1)
        kept = (place > 0) & (place < PAST)
        tl.store(kept_at + (to[:, None] + e[None, :]), x, mask=kept[:, None] & (e < WIDE)[None, :])
        tl.store(kept_at + to + WIDE, tl.where(there, flag, 0.0), mask=kept)
        weight = tl.where(there, flag, 0.0).to(tl.float32)
        allowed = there[None, :] & exists[:, None]
        score = tl.dot(reader, tl.trans(x), input_precision=PRECISION) + constant[:, None] * weight[None, :]
        place_at = line[:, None] * (PAST + 1) + PAST - place[None, :]
        score += tl.load(position + place_at, mask=allowed, other=0.0).to(tl.float32)
        score = tl.where(allowed, score * _LOG2E, float("-inf"))
        largest = tl.maximum(best, tl.max(score, 1))
        weights = tl.exp2(score - largest[:, None])
        rescale = tl.exp2(best - largest)
        total = total * rescale + tl.sum(weights, 1)
        flags = flags * rescale + tl.sum(weights * weight[None, :], 1)
        sums = sums * rescale[:, None] + tl.dot(weights.to(x.dtype), x, input_precision=PRECISION)
        best = largest
    kind: tl.constexpr = sums_of.dtype.element_ty
    tl.store(own_weights + line, (tl.exp2(own - best) / total).to(kind), mask=exists)
    tl.store(sums_of + wide_at, (sums / total[:, None]).to(kind), mask=wide)
    tl.store(sums_of + line * (WIDE + 1) + WIDE, (flags / total).to(kind), mask=exists)
    to = kept_at + (PAST - 1) * (WIDE + 1)
    tl.store(to + e, tl.load(inputs + row * (WIDE + 1) + e, mask=e < WIDE, other=0.0), mask=e < WIDE)
    tl.store(to + WIDE, tl.load(inputs + row * (WIDE + 1) + WIDE))
