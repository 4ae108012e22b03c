# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, PLR0915
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Forward recurrence in Gluon for few rows and few units: one slot per program, float32 products.

A program computes all units of a slot. It keeps HELD blocks of 16 columns of the weights in registers and the others in
shared memory, as it does h. What it computes is :func:`recurl.recurrence.cuda.definition.forward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from recurl.recurrence.cuda.registers import barrier, gru_step, lstm_step, store_kept, two_of
from recurl.recurrence.cuda.single.parts import (
    CHUNK,
    add_product,
    bring,
    page_of,
    ring_of,
    weight_chunks,
)


@gluon.jit
def _bring(input_gates, token, unit, inside, pairs, singles, slot, WIDTH: gl.constexpr, LSTM: gl.constexpr):
    # Start to copy the input gates of one step: LSTM (i, f), (g, o); GRU (r, z), n.
    if LSTM:
        at = input_gates.to(gl.pointer_type(gl.int64)) + token * (2 * WIDTH)
        bring(pairs, slot, at + 2 * unit, inside)
        bring(singles, slot, at + 2 * unit + 1, inside)
    else:
        at = input_gates + token * (3 * WIDTH)
        bring(pairs, slot, (at + WIDTH).to(gl.pointer_type(gl.int64)) + unit, inside)
        bring(singles, slot, at + unit, inside)
    async_copy.commit_group()


@gluon.jit
def _step(
    arrays,
    w0,
    w1,
    w2,
    w3,
    bias,
    unit,
    begin,
    step,
    steps,
    h,
    c,
    first,
    here,
    there,
    HIDDEN: gl.constexpr,
    WIDTH: gl.constexpr,
    LSTM: gl.constexpr,
    KEEP: gl.constexpr,
    EXACT: gl.constexpr,
    HELD: gl.constexpr,
    RING: gl.constexpr,
    L2: gl.constexpr,
):
    # One step: h is read from the pages ``here`` and written to ``there``, as are the inputs of a later step.
    input_gates, stored_h, h_row, h_column, stored_c, c_row, c_column, starts, after_h, after_c, gates = arrays
    pairs, singles, exchange = here
    later_pairs, later_singles, next_exchange = there
    LU: gl.constexpr = gl.SliceLayout(1, L2)
    CHUNKS: gl.constexpr = WIDTH // CHUNK
    real = unit < HIDDEN
    padded = unit < WIDTH
    token = begin + step
    later = step + RING - 1
    inside = padded & (later < steps)
    slot = (step // 2) % (RING // 2)
    _bring(
        input_gates, begin + later, unit, inside, later_pairs, later_singles, (later // 2) % (RING // 2), WIDTH, LSTM
    )
    flag = gl.load(starts + token + 2, mask=step + 2 < steps, other=0)
    zero = gl.zeros([unit.shape[0], CHUNK], gl.float32, L2)
    x0, x1 = two_of(pairs.index(slot).load(LU), 32)
    a0 = zero
    a1 = zero
    a2 = zero
    a3 = zero
    for chunk in gl.static_range(CHUNKS):
        value = exchange.slice(chunk * CHUNK, CHUNK).load(gl.SliceLayout(0, L2))[None, :]
        a0 = add_product(a0, w0, chunk, value, HELD, L2)
        a1 = add_product(a1, w1, chunk, value, HELD, L2)
        a2 = add_product(a2, w2, chunk, value, HELD, L2)
        if LSTM:
            a3 = add_product(a3, w3, chunk, value, HELD, L2)
    if LSTM:
        x2, x3 = two_of(singles.index(slot).load(LU), 32)
        gates_before = (gl.sum(a0, 1) + x0, gl.sum(a1, 1) + x1, gl.sum(a2, 1) + x2, gl.sum(a3, 1) + x3)
        g0, g1, g2, g3, c, h = lstm_step(*gates_before, c, EXACT)
    else:
        x2 = singles.index(slot).load(LU)
        g0, g1, g2, g3, h = gru_step(gl.sum(a0, 1) + x0, gl.sum(a1, 1) + x1, x2, gl.sum(a2, 1) + bias, h, EXACT)
    out_h = h
    out_c = c
    if first != 0:
        h = gl.load(stored_h + (token + 1) * h_row + unit * h_column, mask=real, other=0.0).to(gl.float32)
        if LSTM:
            c = gl.load(stored_c + (token + 1) * c_row + unit * c_column, mask=real, other=0.0).to(gl.float32)
    next_exchange.store(h)
    out = token * HIDDEN + unit
    gl.store(after_h + out, out_h, mask=real)
    if LSTM:
        gl.store(after_c + out, out_c, mask=real)
    if KEEP:
        store_kept(gates, token * WIDTH + unit, padded, g0, g1, g2, g3, EXACT)
    async_copy.wait_group(RING - 2)
    barrier()
    return h, c, flag


@gluon.jit
def single_forward_kernel(
    input_gates,
    b_hn,
    w_hh,
    stored_h,
    h_row,
    h_column,
    stored_c,
    c_row,
    c_column,
    starts,
    bounds,
    after_h,
    after_c,
    gates,
    HIDDEN: gl.constexpr,
    WIDTH: gl.constexpr,
    LSTM: gl.constexpr,
    KEEP: gl.constexpr,
    EXACT: gl.constexpr,
    UNITS: gl.constexpr,
    HELD: gl.constexpr,
    RING: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Run one slot; see ``resident_forward.resident_forward_kernel`` for the common arguments.

    Differences: all weights are in registers, in float32, and are multiplied by plain FMA; four threads share the
    columns of a unit. Inputs are prefetched into a ring of RING steps in shared memory. With EXACT, functions are
    accurate to float32, and the gates are kept in float32. Even and odd steps have separate pages, so that one barrier
    per step is enough.
    """
    L2: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    LU: gl.constexpr = gl.SliceLayout(1, L2)
    CHUNKS: gl.constexpr = WIDTH // CHUNK
    unit = gl.arange(0, UNITS, layout=LU)
    real = unit < HIDDEN
    padded = unit < WIDTH
    w0 = weight_chunks(w_hh, unit, 0, CHUNKS, HELD, HIDDEN, L2, False)
    w1 = weight_chunks(w_hh, unit, 1, CHUNKS, HELD, HIDDEN, L2, False)
    w2 = weight_chunks(w_hh, unit, 2, CHUNKS, HELD, HIDDEN, L2, False)
    w3 = w2
    bias = gl.zeros([UNITS], gl.float32, LU)
    if LSTM:
        w3 = weight_chunks(w_hh, unit, 3, CHUNKS, HELD, HIDDEN, L2, False)
    else:
        bias = gl.load(b_hn + unit, mask=real, other=0.0)
    slot = gl.program_id(0)
    begin = gl.load(bounds + slot)
    steps = (gl.load(bounds + slot + 1) - begin).to(gl.int32)
    OTHER: gl.constexpr = gl.int64 if LSTM else gl.float32
    even = (ring_of(gl.int64, RING // 2, UNITS), ring_of(OTHER, RING // 2, UNITS), page_of(UNITS))
    odd = (ring_of(gl.int64, RING // 2, UNITS), ring_of(OTHER, RING // 2, UNITS), page_of(UNITS))
    for early in gl.static_range(RING - 1):
        inside = padded & (early < steps)
        if early % 2 == 0:
            _bring(input_gates, begin + early, unit, inside, even[0], even[1], early // 2, WIDTH, LSTM)
        else:
            _bring(input_gates, begin + early, unit, inside, odd[0], odd[1], early // 2, WIDTH, LSTM)
    inside = real & (steps > 0)
    h = gl.load(stored_h + begin * h_row + unit * h_column, mask=inside, other=0.0).to(gl.float32)
    c = h
    if LSTM:
        c = gl.load(stored_c + begin * c_row + unit * c_column, mask=inside, other=0.0).to(gl.float32)
    even[2].store(h)
    first = gl.load(starts + begin + 1, mask=steps > 1, other=0)
    async_copy.wait_group(RING - 2)
    barrier()
    arrays = (input_gates, stored_h, h_row, h_column, stored_c, c_row, c_column, starts, after_h, after_c, gates)
    for pair in range((steps + 1) // 2):
        h, c, first = _step(
            *(arrays, w0, w1, w2, w3, bias, unit, begin, 2 * pair, steps, h, c, first, even, odd),
            *(HIDDEN, WIDTH, LSTM, KEEP, EXACT, HELD, RING, L2),
        )
        if 2 * pair + 1 < steps:
            h, c, first = _step(
                *(arrays, w0, w1, w2, w3, bias, unit, begin, 2 * pair + 1, steps, h, c, first, odd, even),
                *(HIDDEN, WIDTH, LSTM, KEEP, EXACT, HELD, RING, L2),
            )
    async_copy.wait_group(0)
