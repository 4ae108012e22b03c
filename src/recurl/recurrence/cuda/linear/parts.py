# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, RUF005, SIM108
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Parts of the linear recurrence kernels: numbers, and the state before a chunk of tokens.

Chunks of the stream are processed concurrently. Each publishes its map of the state before it: ``h -> p h + q``, or
``h -> q`` if p is NaN. p is set to NaN where a segment starts. (Where p is NaN by itself, q is NaN too, or right:
infinity times zero.) A chunk that needs the state before it composes the maps published by the preceding chunks of its
group with the state after the previous group, which the last chunk of that group publishes. Groups are fixed, so that
the same input gives the same bits. Programs start in the order of their numbers, so that the programs that others wait
for have started. If a segment starts in a preceding chunk of its group, a chunk doesn't wait for another group.

64-bit words are published one by one and show by their value whether they are present.
"""

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = -1
"""A word that isn't published yet: a NaN; published NaNs are replaced by the common quiet one."""

_EMPTY = tl.constexpr(EMPTY)


@triton.jit
def load(pointer, offset, mask, KIND: tl.constexpr):
    """Load real and imaginary parts: of words of two float32 ("packed"), of pairs, or real numbers (the same twice)."""
    if KIND == "packed":
        word = tl.load(pointer + offset, mask=mask, other=0)
        real = word.to(tl.int32).to(tl.float32, bitcast=True)
        imag = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif KIND == "pairs":
        real = tl.load(pointer + 2 * offset, mask=mask, other=0.0)
        imag = tl.load(pointer + 2 * offset + 1, mask=mask, other=0.0)
    else:
        real = tl.load(pointer + offset, mask=mask, other=0.0)
        if real.dtype.primitive_bitwidth < 32:
            real = real.to(tl.float32)
        imag = real
    return real, imag


@triton.jit
def store(pointer, offset, real, imag, mask, KIND: tl.constexpr):
    """Write numbers in the format of :func:`load`."""
    if KIND == "packed":
        low = real.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        high = imag.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(pointer + offset, low | high, mask=mask)
    elif KIND == "pairs":
        tl.store(pointer + 2 * offset, real.to(pointer.dtype.element_ty), mask=mask)
        tl.store(pointer + 2 * offset + 1, imag.to(pointer.dtype.element_ty), mask=mask)
    else:
        tl.store(pointer + offset, real.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def bits(flags, step):
    """Return the flags of each row as the bits of a number, ``[ROWS, 1]``."""
    return tl.sum((flags != 0).to(tl.int32) << step, 1)[:, None]


@triton.jit
def is_set(bits, step: tl.constexpr):
    """Return whether a bit is set."""
    return (bits << (31 - step)) < 0


@triton.jit
def times(x, x_imag, y, y_imag, KIND: tl.constexpr):
    """Return the product of two numbers."""
    if KIND == "real":
        real = x * y
        imag = real
    else:
        real = x * y - x_imag * y_imag
        imag = x * y_imag + x_imag * y
    return real, imag


@triton.jit
def times_plus(x, x_imag, y, y_imag, z, z_imag, KIND: tl.constexpr):
    """Return the product of two numbers plus a third."""
    if KIND == "real":
        real = x * y + z
        imag = real
    else:
        real = x * y + z - x_imag * y_imag
        imag = x * y_imag + z_imag + x_imag * y
    return real, imag


@triton.jit
def power(x, x_imag, EXPONENT: tl.constexpr, KIND: tl.constexpr):
    """Return a number to the power of 1, 2, 4, 8 or 16."""
    for k in tl.static_range(4):
        if EXPONENT >> k > 1:
            x, x_imag = times(x, x_imag, x, x_imag, KIND)
    return x, x_imag


@triton.jit
def stored_states(states, at, row, firsts, step: tl.constexpr, inside, KIND: tl.constexpr):
    """Return the stored states of those of four tokens that start segments, fetched together."""
    found = ()
    found_imag = ()
    for k in tl.static_range(4):
        mask = is_set(firsts, step + k) & inside[None, :]
        stored, stored_imag = load(states, at + (step + k) * row, mask, KIND)
        found = found + (stored,)
        found_imag = found_imag + (stored_imag,)
    return found, found_imag


@triton.jit
def states_before(
    h, at, states, stored_at, states_row, firsts, step: tl.constexpr, mask, WIDTH: tl.constexpr, KIND: tl.constexpr
):
    """Return the state before a token: the one after the previous token, or the stored one."""
    first = is_set(firsts, step)
    before, before_imag = load(h, at - (step + 1) * WIDTH, mask & (first == 0), KIND)
    stored, stored_imag = load(states, stored_at - step * states_row, mask & first, KIND)
    return tl.where(first, stored, before), tl.where(first, stored_imag, before_imag)


@triton.jit
def _after_real(p0, q0, p1, q1):
    return p0 * p1, tl.where(p1 == p1, p1 * q0 + q1, q1)


@triton.jit
def _after_complex(p0, p0_imag, q0, q0_imag, p1, p1_imag, q1, q1_imag):
    p, p_imag = times(p0, p0_imag, p1, p1_imag, "packed")
    q, q_imag = after(p1, p1_imag, q0, q0_imag, q1, q1_imag, "packed")
    return p, p_imag, q, q_imag


@triton.jit
def after(p, p_imag, state, state_imag, q, q_imag, KIND: tl.constexpr):
    """Apply the map (p, q) to ``state``."""
    on, on_imag = times_plus(p, p_imag, state, state_imag, q, q_imag, KIND)
    return tl.where(p == p, on, q), tl.where(p == p, on_imag, q_imag)


@triton.jit
def _compose(p, p_imag, q, q_imag, KIND: tl.constexpr):
    """Compose the maps of the rows: return for each row the map from the state before the first row."""
    if KIND == "real":
        p, q = tl.associative_scan((p, q), 0, _after_real)
        p_imag = p
        q_imag = q
    else:
        p, p_imag, q, q_imag = tl.associative_scan((p, p_imag, q, q_imag), 0, _after_complex)
    return p, p_imag, q, q_imag


@triton.jit
def _pick(values, rows, row):
    return tl.sum(tl.where(rows == row, values, 0.0), 0)


@triton.jit
def _word(value):
    value = value.to(tl.float64)
    return tl.where(value == value, value, float("nan")).to(tl.int64, bitcast=True)


@triton.jit
def _publish(at, width, value, value_imag, mask, KIND: tl.constexpr):
    tl.atomic_xchg(at, _word(value), mask=mask, sem="relaxed")
    if KIND != "real":
        tl.atomic_xchg(at + width, _word(value_imag), mask=mask, sem="relaxed")


@triton.jit
def _missing(at, words):
    """Return words, with missing ones read again."""
    return tl.load(at, mask=words == _EMPTY, other=words, volatile=True)


@triton.jit
def _number(words, ACC: tl.constexpr):
    return words.to(tl.float64, bitcast=True).to(ACC)


@triton.jit
def _await(p_at, q_at, imag_at, near, far, ACC: tl.constexpr, KIND: tl.constexpr):
    """Return the maps of chunks, or the state after the previous group, once enough of them are published.

    Args:
        p_at: addresses of the words of p.
        q_at: addresses of the words of q.
        imag_at: offset of the words of the imaginary parts.
        near: chunks whose maps are needed.
        far: entries whose q is needed, unless a p of the column is NaN. Where neither holds, p is NaN and q is zero.
        ACC: dtype of the numbers.
        KIND: kind of the numbers.
    """
    p = tl.where(near, _EMPTY, tl.full(near.shape, float("nan"), tl.float64).to(tl.int64, bitcast=True))
    q = tl.where(near | far, _EMPTY, 0).to(tl.int64)
    p_imag = p
    q_imag = q
    waits = 1
    while waits > 0:
        p = _missing(p_at, p)
        q = _missing(q_at, q)
        there = (p != _EMPTY) & (q != _EMPTY)
        if KIND != "real":
            p_imag = _missing(p_at + imag_at, p_imag)
            q_imag = _missing(q_at + imag_at, q_imag)
            there = there & (p_imag != _EMPTY) & (q_imag != _EMPTY)
        number = _number(p, tl.float64)
        score = tl.where(there, tl.where(near & (number != number), -1, 0), tl.where(near, 1000, 1))
        waits = tl.max(tl.sum(score, 0), 0)
    return _number(p, ACC), _number(p_imag, ACC), _number(q, ACC), _number(q_imag, ACC)


@triton.jit
def states_before_rows(
    p,
    p_imag,
    q,
    q_imag,
    fresh,
    chunk,
    board,
    groups_at,
    d,
    inside,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the state before each row of a chunk, in q's dtype, and publish the map of the chunk.

    Args:
        p: ``[ROWS, COLUMNS]`` in ACC: factor of the map of each row; q is its summand.
        p_imag: its imaginary part.
        q: summand of the map of each row.
        q_imag: its imaginary part.
        fresh: whether the chunk's first token starts a segment.
        chunk: index of the chunk.
        board: where words are published.
        groups_at: offset of the words of the groups.
        d: channels.
        inside: which channels exist.
        WIDTH: D.
        KIND: kind of the numbers.
        ACC: dtype to compute in.
        ROWS: rows of a chunk.
        COLUMNS: channels of a program.
        GROUP: chunks of a group.
    """
    PARTS: tl.constexpr = 1 if KIND == "real" else 2
    walked: tl.constexpr = q.dtype
    rows = tl.arange(0, ROWS)[:, None]
    last = (rows == ROWS - 1) & inside[None, :]
    p, p_imag, q, q_imag = _compose(p, p_imag, q.to(ACC), q_imag.to(ACC), KIND)
    at = board + chunk.to(tl.int64) * (2 * PARTS * WIDTH) + d
    last_at = tl.broadcast_to(at[None, :], [ROWS, COLUMNS])
    _publish(last_at, WIDTH, p, p_imag, last, KIND)
    _publish(last_at + PARTS * WIDTH, WIDTH, q, q_imag, last, KIND)
    group = chunk // GROUP
    member = chunk % GROUP
    group_at = board + groups_at + group.to(tl.int64) * (PARTS * WIDTH) + d
    last_at = tl.broadcast_to(group_at[None, :], [ROWS, COLUMNS])
    ends_group = last & (member == GROUP - 1)
    _publish(last_at, WIDTH, q, q_imag, ends_group & (p != p), KIND)
    state = tl.zeros([COLUMNS], ACC)
    state_imag = tl.zeros([COLUMNS], ACC)
    if fresh == 0:  # row 0: the state after the previous group; then the maps of the preceding chunks
        other = tl.arange(0, GROUP)[:, None]
        far = (other == 0) & (group > 0) & inside[None, :]
        near = (other > 0) & (other <= member) & inside[None, :]
        p_at = at[None, :] + (other - 1 - member) * (2 * PARTS * WIDTH)
        q_at = tl.where(other == 0, (group_at - PARTS * WIDTH)[None, :], p_at + PARTS * WIDTH)
        op, op_imag, oq, oq_imag = _await(p_at, q_at, WIDTH, near, far, ACC, KIND)
        op, op_imag, oq, oq_imag = _compose(op, op_imag, oq, oq_imag, KIND)
        state = _pick(oq, other, member)
        state_imag = _pick(oq_imag, other, member)
    row_state = tl.broadcast_to(state[None, :], [ROWS, COLUMNS])
    row_state_imag = tl.broadcast_to(state_imag[None, :], [ROWS, COLUMNS])
    ends, ends_imag = after(p, p_imag, row_state, row_state_imag, q, q_imag, KIND)
    _publish(last_at, WIDTH, ends, ends_imag, ends_group & (p == p), KIND)
    row_state = _next_row(row_state.to(walked), ends.to(walked), rows)
    if KIND == "real":
        row_state_imag = row_state
    else:
        row_state_imag = _next_row(row_state_imag.to(walked), ends_imag.to(walked), rows)
    return row_state, row_state_imag


@triton.jit
def _later(before0, last0, many0, before1, last1, many1):
    return tl.where(many1 != 0, before1, last0), last1, many1 * 0 + 1


@triton.jit
def _next_row(first, ends, rows):
    """Shift each row's end state to the next row; ``first`` is the state before row 0.

    A scan leaves rows in their threads; after tl.gather all later computations would need conversions between threads.
    """
    moved, _, _ = tl.associative_scan((ends, ends, tl.zeros_like(ends).to(tl.int32)), 0, _later)
    return tl.where(rows == 0, first, moved)
