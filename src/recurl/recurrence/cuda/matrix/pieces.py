# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, PLR0913, PLR0915
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Pieces of rows, which run side by side.

What a piece does to the state before it is a linear map, S -> transfer @ S + added: ``added`` is the state after a
piece from zero, and ``transfer`` the state from the identity with values of zero. Only the segment that reaches the end
of a piece matters: chunks before it are passed over, and ``transfer`` isn't found if it starts in the piece. In the
notation of the forward pass, with S the state that its part of a chunk starts from::

    y = value  # with delta: y_value - y_key @ S
    S = e[-1] * S + (D[-1] * b * key).T @ y
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
    poison,
    rows,
    segments,
    store_matrix,
    stored_state,
)
from recurl.recurrence.cuda.parts import is_bad


@triton.jit
def maps_kernel(
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
    exit_decays,
    added,
    transfer,
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
    PRECISION: tl.constexpr,
):
    """Write the maps of pieces; with DELTA ``value`` is y_value, and ``rate`` exit_weight."""
    program = tl.program_id(0)
    block = program % BLOCKS
    head = ((program // BLOCKS) % heads).to(tl.int64)
    piece = (program // BLOCKS // heads) % pieces
    row = (program // BLOCKS // heads // pieces).to(tl.int64)
    VALUES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    of_identity = block >= VALUES  # a block of the transfer matrix: from the identity, with values and stored states 0
    k = tl.arange(0, BLOCK_K)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = tl.where(of_identity, 0, V)  # those of values and stored states
    t = tl.arange(0, CHUNK)
    inside = t < CHUNK  # a row's last chunk, which may be shorter, is in its last piece, of which there are no maps
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if of_identity:
        state = tl.where(k[:, None] == (v - VALUES * BLOCK_V)[None, :], 1.0, state)
    total = 0.0
    first_chunk, end_chunk = piece * piece_chunks, (piece + 1) * piece_chunks
    start = (tl.load(start_index + row * length + end_chunk * CHUNK - 1) - row * length).to(tl.int32)
    if start >= first_chunk * CHUNK:
        first_chunk = tl.where(of_identity, end_chunk, start // CHUNK)
    for chunk in range(first_chunk, end_chunk):
        begin = row * length + chunk * CHUNK
        first = begin * heads + head
        last_segment = segments(start_index, begin, CHUNK - 1)
        fresh = (last_segment > 0) | (tl.load(start_index + begin) == begin)
        keys = rows(key + begin * key_token + head * key_head, t, key_token, k, inside, K).to(key.dtype.element_ty)
        y = rows(value + begin * value_token + head * value_head, t, value_token, v, inside, columns)
        weight = tl.load(rate + first + t * heads)
        if DELTA:
            reads = rows(solved_key + first * K, t, heads * K, k, inside, K)
            left = tl.load(exit_decays + (row * chunks + chunk) * heads + head)
        else:
            segment = segments(start_index, begin, t)
            elapsed = decays(log_decay + first, t * heads, inside, segment == t)
            left = at(elapsed, t, CHUNK - 1)
            weight = tl.where(segment == last_segment, weight * tl.exp2(left - elapsed), 0.0)
        if fresh:
            state = stored_state(
                states, begin + last_segment, head, states_token, states_head, states_key, states_value, spacing, k, v,
                K, columns, HAS_STATES,
            )  # fmt: skip
        if DELTA:
            y -= dot(reads, state, PRECISION)
        y = weight[:, None] * y
        spoilt = is_bad(y) if DELTA else is_bad(y) | is_bad(keys)
        if spoilt:
            bad = poison(y) if DELTA else poison(y) + poison(keys.to(tl.float32))
            leaves = segments(start_index, begin, t) == last_segment
            y = clean(y) + tl.where(leaves, bad, 0.0)[:, None]
            keys = clean(keys.to(tl.float32)).to(key.dtype.element_ty)
        total += left
        state = tl.exp2(left) * state + dot(tl.trans(keys), y, PRECISION)
    of_piece = (row * pieces + piece) * heads + head
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
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DELTA: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the state before each piece but the first; in reverse the gradient that reaches each piece but the last.

    ``added`` and ``transfer`` are those of all pieces but the last; in reverse ``added`` is that of all but the first.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    head = ((program // BLOCKS) % heads).to(tl.int64)
    row = (program // BLOCKS // heads).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    other = tl.arange(0, BLOCK_K)
    v = (program % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for step in tl.range(pieces - 1, num_stages=STAGES):
        piece = pieces - 1 - step if REVERSE else step
        source = (row * (pieces - 1) + (piece - 1 if REVERSE else piece)) * heads + head
        begin = row * length + piece * piece_tokens
        last = tl.minimum(begin + piece_tokens, (row + 1) * length) - 1
        through = (step > 0) & (tl.load(start_index + last) < begin)  # a segment, from end to end of the piece
        found = matrix(added, source * (K * V), V, 1, k, v, K, V)
        of_piece = (row * (pieces - 1) + piece) * heads + head
        if DELTA:
            keys = tl.where(through, K, 0)
            if REVERSE:
                passed = matrix(transfer, of_piece * (K * K), 1, K, k, other, keys, K)
            else:
                passed = matrix(transfer, of_piece * (K * K), K, 1, k, other, keys, K)
        else:
            passed = tl.load(transfer + of_piece, mask=through, other=0.0)
        if through:
            found += dot(passed, state, PRECISION) if DELTA else passed * state
        state = found
        to = row * (pieces - 1) + (piece - 1 if REVERSE else piece)
        store_matrix(carried, (to * heads + head) * (K * V), k, v, state, K, V)
