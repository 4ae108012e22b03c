# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, C901, PLR0912, PLR0913, PLR0915
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Backward recurrence in Gluon for H <= 512: weights stay on the chip, in one program or shared by a group.

A program computes UNITS hidden units of ROWS slots, with weights as in the forward pass. What it computes is
:func:`recurl.recurrence.cuda.definition.backward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from recurl.recurrence.cuda.registers import (
    arrive,
    collected,
    gru_back,
    kept_of,
    load_kept,
    lstm_back,
    operand,
    publish,
    split,
    store_gradients,
    wait,
)
from recurl.recurrence.cuda.resident.forward import collect_chunks, neighbours, page_layout, weighted, weights


@gluon.jit
def resident_backward_kernel(
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
    buffer,
    flags,
    HIDDEN: gl.constexpr,
    WIDTH: gl.constexpr,
    LSTM: gl.constexpr,
    TO_STORED: gl.constexpr,
    BITS: gl.constexpr,
    EXACT: gl.constexpr,
    CHUNK: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    ACROSS: gl.constexpr,
    UNITS: gl.constexpr,
    MEMBERS: gl.constexpr,
    EXTENT: gl.constexpr,
    SHARED_GATES: gl.constexpr,
):
    """Run ROWS slots from their last token to their first; see ``backward.backward_kernel``.

    Differences: units are padded to WIDTH; ``gates`` are those of ``resident_forward_kernel``; ``grad_gates`` is
    ``[N, 4 * WIDTH]`` with interleaved gates: LSTM ``[WIDTH, 4]``; GRU n ``[WIDTH]``, (r, z) ``[WIDTH, 2]``, hidden
    part of n ``[WIDTH]``. The inputs of a step are fetched one step early.
    """
    KIND: gl.constexpr = gl.bfloat16 if BITS == 16 else gl.float32
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS // ACROSS, ACROSS], [16, 8])
    NEAR: gl.constexpr = neighbours(BITS, EXACT)
    LW: gl.constexpr = gl.DotOperandLayout(0, L, NEAR)
    LD: gl.constexpr = gl.DotOperandLayout(1, L, NEAR)
    group = gl.program_id(0) // MEMBERS
    member = gl.program_id(0) % MEMBERS
    CHUNKS: gl.constexpr = WIDTH // CHUNK
    unit = member * UNITS + gl.arange(0, UNITS, layout=gl.SliceLayout(1, LW))[:, None]
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LW))[None, :]
    HELD: gl.constexpr = (4 if LSTM else 3) - SHARED_GATES  # first gate whose weights are in shared memory
    w0 = weights(w_hh, unit, column, 0, CHUNKS, HELD, HIDDEN, BITS, EXACT, True)
    w1 = weights(w_hh, unit, column, 1, CHUNKS, HELD, HIDDEN, BITS, EXACT, True)
    w2 = weights(w_hh, unit, column, 2, CHUNKS, HELD, HIDDEN, BITS, EXACT, True)
    EXCHANGE: gl.constexpr = page_layout(BITS, EXACT)
    exchange0 = gl.allocate_shared_memory(KIND, [ROWS, EXTENT], EXCHANGE)
    exchange1 = gl.allocate_shared_memory(KIND, [ROWS, EXTENT], EXCHANGE)
    exchange2 = gl.allocate_shared_memory(KIND, [ROWS, EXTENT], EXCHANGE)
    if LSTM:
        w3 = weights(w_hh, unit, column, 3, CHUNKS, HELD, HIDDEN, BITS, EXACT, True)
        exchange3 = gl.allocate_shared_memory(KIND, [ROWS, EXTENT], EXCHANGE)
    j = member * UNITS + gl.arange(0, UNITS, layout=gl.SliceLayout(1, L))
    real = (j < HIDDEN)[:, None]
    slot = group * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
    begin = gl.load(bounds + slot)
    end = gl.load(bounds + slot + 1)
    length = (end - begin).to(gl.int32)
    steps = gl.max(length, 0)
    after = after_c if LSTM else after_h
    zero = gl.zeros([UNITS, ROWS], gl.float32, L)
    back = zero
    carried = zero
    token = end - 1
    active = length > 0
    inside = active[None, :] & real
    packed, more = load_kept(gates, token[None, :] * WIDTH + j[:, None], inside, EXACT)
    dh = gl.load(grad_h + token[None, :] * gh_row + j[:, None] * gh_column, mask=inside, other=0.0)
    dc = zero
    state = zero
    if LSTM:
        dc = gl.load(grad_c + token[None, :] * gc_row + j[:, None] * gc_column, mask=inside, other=0.0).to(gl.float32)
        state = gl.load(after + token[None, :] * HIDDEN + j[:, None], mask=inside, other=0.0)
    first = (gl.load(starts + token, mask=active, other=0) != 0) & active
    next_first = (gl.load(starts + token - 1, mask=length > 1, other=0) != 0) & (length > 1)
    held = gl.load(
        stored + token[None, :] * stored_row + j[:, None] * stored_column, mask=first[None, :] & real, other=0.0
    ).to(gl.float32)
    earlier = gl.load(after + (token - 1)[None, :] * HIDDEN + j[:, None], mask=(length > 1)[None, :] & real, other=0.0)
    for step in range(steps):
        active = step < length
        token = end - 1 - step
        # Fetch the next step.
        ahead = step + 1 < length
        further = step + 2 < length
        inside = ahead[None, :] & real
        next_packed, next_more = load_kept(gates, (token - 1)[None, :] * WIDTH + j[:, None], inside, EXACT)
        next_dh = gl.load(grad_h + (token - 1)[None, :] * gh_row + j[:, None] * gh_column, mask=inside, other=0.0)
        next_dc = zero
        if LSTM:
            next_dc = gl.load(
                grad_c + (token - 1)[None, :] * gc_row + j[:, None] * gc_column, mask=inside, other=0.0
            ).to(gl.float32)
        next_earlier = gl.load(
            after + (token - 2)[None, :] * HIDDEN + j[:, None], mask=further[None, :] & real, other=0.0
        )
        next_held = gl.load(
            stored + (token - 1)[None, :] * stored_row + j[:, None] * stored_column,
            mask=next_first[None, :] & real,
            other=0.0,
        ).to(gl.float32)
        flag = gl.load(starts + token - 2, mask=further, other=0)

        g0, g1, g2, g3 = kept_of(packed, more, EXACT)
        before = gl.where(first[None, :], held, earlier)
        total = dh.to(gl.float32) + back
        if LSTM:
            d0, d1, d2, d3, carried = lstm_back(g0, g1, g2, g3, state, before, total, dc + carried, EXACT)
        else:
            d0, d1, d2, d3, carried = gru_back(g0, g1, g2, g3, before, total + carried)
        if MEMBERS == 1:
            exchange0.permute((1, 0)).store(operand(d0, BITS, EXACT))
            exchange1.permute((1, 0)).store(operand(d1, BITS, EXACT))
            exchange2.permute((1, 0)).store(operand(d2, BITS, EXACT))
            if LSTM:
                exchange3.permute((1, 0)).store(operand(d3, BITS, EXACT))
        else:
            lane = gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
            mail = buffer + (2 * group + step % 2) * (4 * ROWS * WIDTH)
            publish(mail, lane[None, :], j[:, None], WIDTH, operand(d0, BITS, EXACT))
            publish(mail + ROWS * WIDTH, lane[None, :], j[:, None], WIDTH, operand(d1, BITS, EXACT))
            publish(mail + 2 * ROWS * WIDTH, lane[None, :], j[:, None], WIDTH, operand(d2, BITS, EXACT))
            if LSTM:
                publish(mail + 3 * ROWS * WIDTH, lane[None, :], j[:, None], WIDTH, operand(d3, BITS, EXACT))
            arrive(flags + group)
        if TO_STORED:
            gl.store(grad_stored + token[None, :] * HIDDEN + j[:, None], carried, mask=(first & active)[None, :] & real)
        inside = active[None, :] & (j < WIDTH)[:, None]
        store_gradients(grad_gates, token[None, :], j[:, None], inside, d0, d1, d2, d3, WIDTH, LSTM, BITS)
        if MEMBERS > 1:
            wait(flags + group, (step + 1) * MEMBERS)
            collect_chunks(mail, exchange0, ROWS, CHUNK, CHUNKS, WIDTH, WARPS)
            collect_chunks(mail + ROWS * WIDTH, exchange1, ROWS, CHUNK, CHUNKS, WIDTH, WARPS)
            collect_chunks(mail + 2 * ROWS * WIDTH, exchange2, ROWS, CHUNK, CHUNKS, WIDTH, WARPS)
            if LSTM:
                collect_chunks(mail + 3 * ROWS * WIDTH, exchange3, ROWS, CHUNK, CHUNKS, WIDTH, WARPS)
            collected()
        back = zero
        other = zero
        for chunk in gl.static_range(CHUNKS):
            high, low = split(exchange0.slice(chunk * CHUNK, CHUNK, 1).permute((1, 0)).load(LD), EXACT)
            back = weighted(w0, 0, chunk, high, low, back, HELD, LW, EXACT)
            high, low = split(exchange1.slice(chunk * CHUNK, CHUNK, 1).permute((1, 0)).load(LD), EXACT)
            other = weighted(w1, 1, chunk, high, low, other, HELD, LW, EXACT)
            high, low = split(exchange2.slice(chunk * CHUNK, CHUNK, 1).permute((1, 0)).load(LD), EXACT)
            back = weighted(w2, 2, chunk, high, low, back, HELD, LW, EXACT)
            if LSTM:
                high, low = split(exchange3.slice(chunk * CHUNK, CHUNK, 1).permute((1, 0)).load(LD), EXACT)
                other = weighted(w3, 3, chunk, high, low, other, HELD, LW, EXACT)
        # The first token of a segment passes no gradient to the previous token.
        linked = (active & (first == 0))[None, :]
        back = gl.where(linked, back + other, 0.0)
        carried = gl.where(linked, carried, 0.0)
        packed = next_packed
        more = next_more
        dh = next_dh
        dc = next_dc
        state = earlier
        earlier = next_earlier
        held = next_held
        first = next_first
        next_first = (flag != 0) & further
