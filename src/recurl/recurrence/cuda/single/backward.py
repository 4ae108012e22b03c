# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, PLR0915
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Backward recurrence in Gluon for few rows and few units: one slot per program, float32 products.

A program computes all units of a slot, with weights as in the forward pass. What it computes is
:func:`recurl.recurrence.cuda.definition.backward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from recurl.recurrence.cuda.registers import barrier, gru_back, kept_of, lstm_back, store_gradients
from recurl.recurrence.cuda.single.parts import CHUNK, add_product, bring, page_of, ring_of, weight_chunks


@gluon.jit
def _bring(arrays, rings, slot, token, unit, inside, earlier, WIDTH: gl.constexpr, HIDDEN: gl.constexpr, LSTM, EXACT):
    # Start to copy the inputs of a step: its gates, the incoming gradients, the state before it.
    grad_h, gh_row, gh_column, grad_c, gc_row, gc_column, gates, after = arrays
    at = token * WIDTH + unit
    packed = gates.to(gl.pointer_type(gl.int64))
    if EXACT:
        bring(rings[0], slot, packed + 2 * at, inside)
        bring(rings[1], slot, packed + 2 * at + 1, inside)
    else:
        bring(rings[0], slot, packed + at, inside)
    bring(rings[2], slot, grad_h + token * gh_row + unit * gh_column, inside)
    if LSTM:
        bring(rings[3], slot, grad_c + token * gc_row + unit * gc_column, inside)
    bring(rings[4], slot, after + (token - 1) * HIDDEN + unit, earlier)
    async_copy.commit_group()


@gluon.jit
def _step(
    arrays,
    stored_at,
    starts,
    grad_gates,
    grad_stored,
    w0,
    w1,
    w2,
    w3,
    unit,
    end,
    step,
    steps,
    back,
    carried,
    state,
    first,
    rings,
    later_rings,
    pages,
    HIDDEN: gl.constexpr,
    WIDTH: gl.constexpr,
    LSTM: gl.constexpr,
    TO_STORED: gl.constexpr,
    EXACT: gl.constexpr,
    HELD: gl.constexpr,
    RING: gl.constexpr,
    L2: gl.constexpr,
):
    # One step: inputs come from ``rings``, those of a later step are copied to ``later_rings``, gradients to ``pages``.
    LU: gl.constexpr = gl.SliceLayout(1, L2)
    LK: gl.constexpr = gl.SliceLayout(0, L2)
    real = unit < HIDDEN
    token = end - 1 - step
    later = step + RING - 1
    _bring(
        *(arrays, later_rings, (later // 2) % (RING // 2), end - 1 - later, unit),
        *(real & (later < steps), real & (later + 1 < steps), WIDTH, HIDDEN, LSTM, EXACT),
    )
    flag = gl.load(starts + token - 1, mask=step + 1 < steps, other=0)
    slot = (step // 2) % (RING // 2)
    g0, g1, g2, g3 = kept_of(rings[0].index(slot).load(LU), rings[1].index(slot).load(LU), EXACT)
    earlier = rings[4].index(slot).load(LU)
    before = earlier
    if first != 0:
        stored, stored_row, stored_column = stored_at
        before = gl.load(stored + token * stored_row + unit * stored_column, mask=real, other=0.0).to(gl.float32)
    dh = rings[2].index(slot).load(LU) + back
    if LSTM:
        dc = rings[3].index(slot).load(LU) + carried
        d0, d1, d2, d3, carried = lstm_back(g0, g1, g2, g3, state, before, dh, dc, EXACT)
        pages[3].store(d3)
    else:
        d0, d1, d2, d3, carried = gru_back(g0, g1, g2, g3, before, dh + carried)
    pages[0].store(d0)
    pages[1].store(d1)
    pages[2].store(d2)
    store_gradients(grad_gates, token, unit, unit < WIDTH, d0, d1, d2, d3, WIDTH, LSTM, 32)
    if TO_STORED:
        gl.store(grad_stored + token * HIDDEN + unit, carried, mask=real & (first != 0))
    async_copy.wait_group(RING - 2)
    barrier()
    acc = gl.zeros([unit.shape[0], CHUNK], gl.float32, L2)
    other = acc
    for chunk in gl.static_range(WIDTH // CHUNK):
        value = pages[0].slice(chunk * CHUNK, CHUNK).load(LK)[None, :]
        acc = add_product(acc, w0, chunk, value, HELD, L2)
        value = pages[1].slice(chunk * CHUNK, CHUNK).load(LK)[None, :]
        other = add_product(other, w1, chunk, value, HELD, L2)
        value = pages[2].slice(chunk * CHUNK, CHUNK).load(LK)[None, :]
        acc = add_product(acc, w2, chunk, value, HELD, L2)
        if LSTM:
            value = pages[3].slice(chunk * CHUNK, CHUNK).load(LK)[None, :]
            other = add_product(other, w3, chunk, value, HELD, L2)
    # The first token of a segment passes no gradient to the previous token.
    back = gl.where(first != 0, 0.0, gl.sum(acc + other, 1))
    carried = gl.where(first != 0, 0.0, carried)
    return back, carried, earlier, flag


@gluon.jit
def single_backward_kernel(
    grad_h,
    gh_row,
    gh_column,
    grad_c,
    gc_row,
    gc_column,
    gates,
    w_hh,
    stored,
    stored_row,
    stored_column,
    after_h,
    after_c,
    starts,
    bounds,
    grad_gates,
    grad_stored,
    HIDDEN: gl.constexpr,
    WIDTH: gl.constexpr,
    LSTM: gl.constexpr,
    TO_STORED: gl.constexpr,
    EXACT: gl.constexpr,
    UNITS: gl.constexpr,
    HELD: gl.constexpr,
    RING: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Run one slot from its last token to its first; see ``resident_backward.resident_backward_kernel``.

    Differences: as for ``single_forward.single_forward_kernel``.
    """
    L2: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    LU: gl.constexpr = gl.SliceLayout(1, L2)
    CHUNKS: gl.constexpr = WIDTH // CHUNK
    unit = gl.arange(0, UNITS, layout=LU)
    real = unit < HIDDEN
    w0 = weight_chunks(w_hh, unit, 0, CHUNKS, HELD, HIDDEN, L2, True)
    w1 = weight_chunks(w_hh, unit, 1, CHUNKS, HELD, HIDDEN, L2, True)
    w2 = weight_chunks(w_hh, unit, 2, CHUNKS, HELD, HIDDEN, L2, True)
    w3 = w2
    if LSTM:
        w3 = weight_chunks(w_hh, unit, 3, CHUNKS, HELD, HIDDEN, L2, True)
    slot = gl.program_id(0)
    begin = gl.load(bounds + slot)
    end = gl.load(bounds + slot + 1)
    steps = (end - begin).to(gl.int32)
    after = after_c if LSTM else after_h
    # Gates, the second half of float32 gates, gradients of h and c, the state before.
    even0 = ring_of(gl.int64, RING // 2, UNITS)
    odd0 = ring_of(gl.int64, RING // 2, UNITS)
    even1 = ring_of(gl.int64, RING // 2, UNITS) if EXACT else even0
    odd1 = ring_of(gl.int64, RING // 2, UNITS) if EXACT else odd0
    even2 = ring_of(gl.float32, RING // 2, UNITS)
    odd2 = ring_of(gl.float32, RING // 2, UNITS)
    even3 = ring_of(gl.float32, RING // 2, UNITS) if LSTM else even2
    odd3 = ring_of(gl.float32, RING // 2, UNITS) if LSTM else odd2
    even4 = ring_of(gl.float32, RING // 2, UNITS)
    odd4 = ring_of(gl.float32, RING // 2, UNITS)
    even = (even0, even1, even2, even3, even4)
    odd = (odd0, odd1, odd2, odd3, odd4)
    page = page_of(UNITS)
    other_page = page_of(UNITS)
    pages = (page_of(UNITS), page_of(UNITS), page_of(UNITS), page_of(UNITS) if LSTM else page)
    other_pages = (page_of(UNITS), page_of(UNITS), page_of(UNITS), page_of(UNITS) if LSTM else other_page)
    arrays = (grad_h, gh_row, gh_column, grad_c, gc_row, gc_column, gates, after)
    for early in gl.static_range(RING - 1):
        rings = even if early % 2 == 0 else odd
        _bring(
            *(arrays, rings, early // 2, end - 1 - early, unit, real & (early < steps), real & (early + 1 < steps)),
            *(WIDTH, HIDDEN, LSTM, EXACT),
        )
    back = gl.zeros([UNITS], gl.float32, LU)
    carried = back
    state = gl.load(after + (end - 1) * HIDDEN + unit, mask=real & (steps > 0), other=0.0)
    first = gl.load(starts + end - 1, mask=steps > 0, other=0)
    async_copy.wait_group(RING - 2)
    barrier()
    for pair in range((steps + 1) // 2):
        back, carried, state, first = _step(
            *(arrays, (stored, stored_row, stored_column), starts, grad_gates, grad_stored, w0, w1, w2, w3, unit),
            *(end, 2 * pair, steps, back, carried, state, first, even, odd, pages),
            *(HIDDEN, WIDTH, LSTM, TO_STORED, EXACT, HELD, RING, L2),
        )
        if 2 * pair + 1 < steps:
            back, carried, state, first = _step(
                *(arrays, (stored, stored_row, stored_column), starts, grad_gates, grad_stored, w0, w1, w2, w3, unit),
                *(end, 2 * pair + 1, steps, back, carried, state, first, odd, even, other_pages),
                *(HIDDEN, WIDTH, LSTM, TO_STORED, EXACT, HELD, RING, L2),
            )
    async_copy.wait_group(0)
