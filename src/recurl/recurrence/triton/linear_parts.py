# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913
# Kernel bodies are a language of their own: Triton's types are known to its compiler alone, and a body is one function,
# however long, with all its arguments.
"""Pieces of the linear recurrences' kernels: numbers, and how a chunk of tokens gets the state before it.

Chunks of the stream are worked on at once. Each publishes what it does to the state before it: ``h -> p h + q``, or, if
a segment starts in it (it is *cut*), ``q`` whatever came before. A chunk that needs the state before it composes what
the chunks before it in its group have published with the state after the group before, which the last chunk of that
group publishes. Groups are fixed, so that the same input gives the same bits; chunks are taken by ticket, so that those
that are waited for have begun.

Words of 64 bits are published one by one and say for themselves whether they are there.
"""

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = -1
"""A word that isn't published yet: a NaN that is made quiet, as one of a common pattern, before it is published."""
CUT = 0x7FF0DEAD00000001
"""In the place of p: a segment starts. A NaN that no computation gives."""

_EMPTY = tl.constexpr(EMPTY)
_CUT = tl.constexpr(CUT)


@triton.jit
def load(pointer, offset, mask, KIND: tl.constexpr):
    """Real and imaginary parts: of words of two float32 ("packed"), of pairs, or of real numbers (twice the same)."""
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
    """Write what :func:`load` reads."""
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
def again(real, imag, nothing, ACC: tl.constexpr, KIND: tl.constexpr):
    """A number in ACC, converted anew: what was converted before would take twice the registers until here.

    ``nothing`` is -0.0, which adds nothing to any number, and which the compiler doesn't know.
    """
    if real.dtype != ACC:
        real = real + nothing
    wide = real.to(ACC)
    wide_imag = wide
    if KIND != "real":
        if imag.dtype != ACC:
            imag = imag + nothing
        wide_imag = imag.to(ACC)
    return wide, wide_imag


@triton.jit
def bits(flags, step, none):
    """The flags of each row as the bits of a number, in all columns.

    ``none`` is a row of zeros that the compiler doesn't know: it would take each bit apart first, and
    lay each out anew.
    """
    number = tl.sum((flags != 0).to(tl.int32) << step, 1)
    return number[:, None] | none


@triton.jit
def is_set(bits, step: tl.constexpr):
    """Whether a bit is set."""
    return tl.max_constancy((bits << (31 - step)) < 0, [1, bits.shape[1]])


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
def _after_real(p0, q0, cut0, p1, q1, cut1):
    return p0 * p1, tl.where(cut1 != 0, q1, p1 * q0 + q1), cut0 | cut1


@triton.jit
def _after_complex(p0, p0_imag, q0, q0_imag, cut0, p1, p1_imag, q1, q1_imag, cut1):
    p, p_imag = times(p0, p0_imag, p1, p1_imag, "packed")
    q, q_imag = times(p1, p1_imag, q0, q0_imag, "packed")
    cut = cut1 != 0
    return p, p_imag, tl.where(cut, q1, q + q1), tl.where(cut, q1_imag, q_imag + q1_imag), cut0 | cut1


# Pairs: of all rows but the last (e), and of all rows. One row: nothing, and what it does itself.
@triton.jit
def _pair_after_real(ep0, eq0, ecut0, p0, q0, cut0, ep1, eq1, ecut1, p1, q1, cut1):
    ep, eq, ecut = _after_real(p0, q0, cut0, ep1, eq1, ecut1)
    p, q, cut = _after_real(p0, q0, cut0, p1, q1, cut1)
    return ep, eq, ecut, p, q, cut


@triton.jit
def _pair_after_complex(
    ep0, ep0_imag, eq0, eq0_imag, ecut0, p0, p0_imag, q0, q0_imag, cut0,
    ep1, ep1_imag, eq1, eq1_imag, ecut1, p1, p1_imag, q1, q1_imag, cut1,
):  # fmt: skip
    ep, ep_imag, eq, eq_imag, ecut = _after_complex(p0, p0_imag, q0, q0_imag, cut0, ep1, ep1_imag, eq1, eq1_imag, ecut1)
    p, p_imag, q, q_imag, cut = _after_complex(p0, p0_imag, q0, q0_imag, cut0, p1, p1_imag, q1, q1_imag, cut1)
    return ep, ep_imag, eq, eq_imag, ecut, p, p_imag, q, q_imag, cut


@triton.jit
def _compose(p, p_imag, q, q_imag, cut, KIND: tl.constexpr):
    """What all rows up to each do to the state before the first."""
    if KIND == "real":
        p, q, cut = tl.associative_scan((p, q, cut), 0, _after_real)
        p_imag = p
        q_imag = q
    else:
        p, p_imag, q, q_imag, cut = tl.associative_scan((p, p_imag, q, q_imag, cut), 0, _after_complex)
    return p, p_imag, q, q_imag, cut


@triton.jit
def _compose_pairs(p, p_imag, q, q_imag, cut, KIND: tl.constexpr):
    """What all rows before each do to the state before the first, and what all up to it do."""
    zero = tl.zeros_like(p)
    one = zero + 1.0
    none = tl.zeros_like(cut)
    if KIND == "real":
        ep, eq, ecut, p, q, cut = tl.associative_scan((one, zero, none, p, q, cut), 0, _pair_after_real)
        ep_imag = ep
        eq_imag = eq
        p_imag = p
        q_imag = q
    else:
        ep, ep_imag, eq, eq_imag, ecut, p, p_imag, q, q_imag, cut = tl.associative_scan(
            (one, zero, zero, zero, none, p, p_imag, q, q_imag, cut), 0, _pair_after_complex
        )
    return ep, ep_imag, eq, eq_imag, ecut, p, p_imag, q, q_imag, cut


@triton.jit
def _pick(values, rows, row):
    return tl.sum(tl.where(rows == row, values, 0.0), 0)


@triton.jit
def _word(value):
    value = value.to(tl.float64)
    return tl.where(value == value, value, float("nan")).to(tl.int64, bitcast=True)


@triton.jit
def _publish_state(at, width, q, q_imag, mask, KIND: tl.constexpr):
    tl.atomic_xchg(at, _word(q), mask=mask, sem="relaxed")
    if KIND != "real":
        tl.atomic_xchg(at + width, _word(q_imag), mask=mask, sem="relaxed")


@triton.jit
def _publish(at, width, p, p_imag, q, q_imag, cut, mask, KIND: tl.constexpr):
    tl.atomic_xchg(at, tl.where(cut != 0, _CUT, _word(p)), mask=mask, sem="relaxed")
    if KIND == "real":
        _publish_state(at + width, width, q, q_imag, mask, KIND)
    else:
        tl.atomic_xchg(at + width, _word(p_imag), mask=mask, sem="relaxed")
        _publish_state(at + 2 * width, width, q, q_imag, mask, KIND)


@triton.jit
def _read(at, width, mask, KIND: tl.constexpr):
    """Two or, if complex, four words; whether all are there."""
    w0 = tl.load(at, mask=mask, other=0, volatile=True)
    w1 = tl.load(at + width, mask=mask, other=0, volatile=True)
    there = (w0 != _EMPTY) & (w1 != _EMPTY)
    if KIND == "real":
        w2 = w0
        w3 = w1
    else:
        w2 = tl.load(at + 2 * width, mask=mask, other=0, volatile=True)
        w3 = tl.load(at + 3 * width, mask=mask, other=0, volatile=True)
        there = there & (w2 != _EMPTY) & (w3 != _EMPTY)
    return w0, w1, w2, w3, tl.min(tl.min(there.to(tl.int32), 1), 0)


@triton.jit
def _await_published(at, width, mask, ACC: tl.constexpr, KIND: tl.constexpr):
    w0, w1, w2, w3, there = _read(at, width, mask, KIND)
    while there == 0:
        w0, w1, w2, w3, there = _read(at, width, mask, KIND)
    cut = (w0 == _CUT).to(tl.int32)
    p = tl.where(cut != 0, 0, w0).to(tl.float64, bitcast=True).to(ACC)
    if KIND == "real":
        p_imag = p
        q = w1.to(tl.float64, bitcast=True).to(ACC)
        q_imag = q
    else:
        p_imag = w1.to(tl.float64, bitcast=True).to(ACC)
        q = w2.to(tl.float64, bitcast=True).to(ACC)
        q_imag = w3.to(tl.float64, bitcast=True).to(ACC)
    return p, p_imag, q, q_imag, cut


@triton.jit
def _await_state(at, width, mask, ACC: tl.constexpr, KIND: tl.constexpr):
    PARTS: tl.constexpr = 1 if KIND == "real" else 2
    part = tl.arange(0, PARTS)[:, None] * width
    word = tl.load(at[None, :] + part, mask=mask[None, :], other=0, volatile=True)
    while tl.min(tl.min((word != _EMPTY).to(tl.int32), 1), 0) == 0:
        word = tl.load(at[None, :] + part, mask=mask[None, :], other=0, volatile=True)
    value = word.to(tl.float64, bitcast=True)
    which = tl.arange(0, PARTS)[:, None]
    return _pick(value, which, 0).to(ACC), _pick(value, which, PARTS - 1).to(ACC)


@triton.jit
def states_before_rows(
    p,
    p_imag,
    q,
    q_imag,
    cut,
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
    """Return the state before each row of a chunk; publish what the chunk does.

    Args:
        p: ``[ROWS, COLUMNS]``, like q: what each row does to the state before it, and so on.
        p_imag: its imaginary part.
        q: what a row adds.
        q_imag: its imaginary part.
        cut: nonzero where a segment starts in the row.
        fresh: whether the chunk's first token starts a segment.
        chunk: its number.
        board: where words are published.
        groups_at: where those of the groups begin.
        d: channels.
        inside: which of them there are.
        WIDTH: D.
        KIND: of the numbers.
        ACC: dtype to compute in.
        ROWS: of a chunk.
        COLUMNS: channels of a program.
        GROUP: chunks of a group.
    """
    WORDS: tl.constexpr = 2 if KIND == "real" else 4
    rows = tl.arange(0, ROWS)[:, None]
    ep, ep_imag, eq, eq_imag, ecut, p, p_imag, q, q_imag, cut = _compose_pairs(p, p_imag, q, q_imag, cut, KIND)
    last_p = _pick(p, rows, ROWS - 1)
    last_p_imag = _pick(p_imag, rows, ROWS - 1)
    last_q = _pick(q, rows, ROWS - 1)
    last_q_imag = _pick(q_imag, rows, ROWS - 1)
    chunk_cut = tl.max(tl.max(cut, 1), 0)
    wide = chunk.to(tl.int64)
    at = board + wide * (WORDS * WIDTH) + d
    _publish(at, WIDTH, last_p, last_p_imag, last_q, last_q_imag, chunk_cut, inside, KIND)
    group = chunk // GROUP
    member = chunk % GROUP
    group_at = board + groups_at + group.to(tl.int64) * (WORDS * WIDTH) + d
    if (member == GROUP - 1) & (chunk_cut != 0):
        _publish_state(group_at, WIDTH, last_q, last_q_imag, inside, KIND)
    state = tl.zeros_like(last_q)
    state_imag = tl.zeros_like(state)
    if fresh == 0:
        before_p = tl.full([COLUMNS], 1.0, ACC)
        before_p_imag = tl.zeros([COLUMNS], ACC)
        before_cut = chunk * 0
        if member > 0:
            other = tl.arange(0, GROUP)[:, None]
            others_at = board + (group.to(tl.int64) * GROUP + other) * (WORDS * WIDTH) + d[None, :]
            mask = (other < member) & inside[None, :]
            op, op_imag, oq, oq_imag, ocut = _await_published(others_at, WIDTH, mask, ACC, KIND)
            op, op_imag, oq, oq_imag, ocut = _compose(op, op_imag, oq, oq_imag, ocut, KIND)
            before_p = _pick(op, other, member - 1)
            before_p_imag = _pick(op_imag, other, member - 1)
            state = _pick(oq, other, member - 1)
            state_imag = _pick(oq_imag, other, member - 1)
            before_cut = tl.max(tl.max(tl.where(other == member - 1, ocut, 0), 1), 0)
        if before_cut == 0:
            far, far_imag = _await_state(group_at - WORDS * WIDTH, WIDTH, inside, ACC, KIND)
            far, far_imag = times(before_p, before_p_imag, far, far_imag, KIND)
            state += far
            state_imag += far_imag
        if (member == GROUP - 1) & (chunk_cut == 0):
            after, after_imag = times(last_p, last_p_imag, state, state_imag, KIND)
            _publish_state(group_at, WIDTH, after + last_q, after_imag + last_q_imag, inside, KIND)
    row_state = tl.broadcast_to(state[None, :], [ROWS, COLUMNS])
    row_state_imag = tl.broadcast_to(state_imag[None, :], [ROWS, COLUMNS])
    before, before_imag = times(ep, ep_imag, row_state, row_state_imag, KIND)
    return tl.where(ecut != 0, eq, before + eq), tl.where(ecut != 0, eq_imag, before_imag + eq_imag)
