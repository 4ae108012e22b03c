# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, C901, PLR0912, PLR0913, PLR0915, SIM108
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments. An if on a constant is a statement because only one of its branches is compiled.
"""Forward recurrence in Gluon for H <= 512: weights stay on the chip, in one program or shared by a group.

A program computes UNITS hidden units of ROWS slots. It keeps the weights of some gates in registers and those of
SHARED_GATES in shared memory. What it computes is :func:`recurl.recurrence.cuda.definition.forward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from recurl.recurrence.cuda.registers import (
    arrive,
    collect,
    collected,
    fetch,
    gru_step,
    lstm_step,
    operand,
    product,
    publish,
    split,
    store_kept,
    two_of,
    wait,
)


@gluon.constexpr_function
def neighbours(bits, exact):
    """Return how many adjacent columns of an operand a thread holds, read from shared memory in one access."""
    return 2 if bits == 16 or exact else 1


@gluon.constexpr_function
def page_layout(bits, exact):
    """Return a layout of shared memory whose rows are swizzled so that reading operands has no bank conflicts."""
    vector = 4 * neighbours(bits, exact)
    return gl.SwizzledSharedLayout(vector, 1, 1024 // (vector * bits), [1, 0])


@gluon.jit
def weights(
    w_hh,
    unit,
    column,
    gate: gl.constexpr,
    CHUNKS: gl.constexpr,
    HELD: gl.constexpr,
    HIDDEN: gl.constexpr,
    BITS: gl.constexpr,
    EXACT: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """Load the weights of one gate from or to the units, padded with zeros, as operands ``[units, columns]`` in CHUNKS.

    Those of the first HELD gates are tensors in registers, the others are pages of shared memory.
    """
    KIND: gl.constexpr = gl.bfloat16 if BITS == 16 else gl.float32
    PAGE: gl.constexpr = page_layout(BITS, EXACT)
    found = ()
    for chunk in gl.static_range(CHUNKS):
        k = chunk * column.shape[1] + column
        if TRANSPOSED:
            at = w_hh + (gate * HIDDEN + k) * HIDDEN + unit
        else:
            at = w_hh + (gate * HIDDEN + unit) * HIDDEN + k
        value = operand(gl.load(at, mask=(unit < HIDDEN) & (k < HIDDEN), other=0.0), BITS, EXACT)
        if gate < HELD:
            found = found + (value,)  # noqa: RUF005 - Gluon has no unpacking here
        else:
            page = gl.allocate_shared_memory(KIND, [unit.shape[0], column.shape[1]], PAGE, value)
            found = found + (page,)  # noqa: RUF005 - likewise
    return found


@gluon.jit
def weighted(w, gate: gl.constexpr, chunk: gl.constexpr, high, low, acc, HELD: gl.constexpr, LW, EXACT: gl.constexpr):
    """Add the product of one chunk of :func:`weights` with a :func:`registers.split` operand to ``acc``."""
    if gate < HELD:
        acc = product(w[chunk], high, low, acc, EXACT)
    else:
        acc = product(w[chunk].load(LW), high, low, acc, EXACT)
    return acc


@gluon.jit
def collect_chunks(
    source,
    exchange,
    ROWS: gl.constexpr,
    CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr,
    STRIDE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Start to copy ``[ROWS, CHUNKS * CHUNK]`` of a matrix with STRIDE columns to shared memory."""
    for chunk in gl.static_range(CHUNKS):
        page = exchange.slice(chunk * CHUNK, CHUNK, 1)
        collect(source + chunk * CHUNK, page, ROWS, CHUNK, STRIDE, WARPS)


@gluon.jit
def resident_forward_kernel(
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
    buffer,
    flags,
    HIDDEN: gl.constexpr,
    WIDTH: gl.constexpr,
    LSTM: gl.constexpr,
    KEEP: gl.constexpr,
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
    AHEAD: gl.constexpr,
):
    """Run ROWS slots; see ``forward.forward_kernel``. Units are padded to WIDTH.

    Differences: ``input_gates`` are padded and interleaved (LSTM ``[N, WIDTH, 4]``; GRU n ``[WIDTH]``, then (r, z)
    ``[WIDTH, 2]``), ``gates`` are float16 ``[N, WIDTH, 4]``. Input gates are fetched AHEAD (1 or 2) steps early, stored
    states one. Gates are computed transposed, [units, slots], so that a tile may have as few as eight slots.
    A group of MEMBERS programs shares the units, UNITS each, and exchanges h through ``buffer``, two alternating
    ``[ROWS, WIDTH]`` per group; ``flags`` count arrivals and are zero.
    The weights of the last SHARED_GATES gates are in shared memory because registers don't suffice. WIDTH is a multiple
    of CHUNK; CHUNK, ROWS, UNITS and EXTENT (at least WIDTH) are powers of two. With EXACT, products and functions are
    accurate to float32, and the gates are kept in float32.
    """
    KIND: gl.constexpr = gl.bfloat16 if BITS == 16 else gl.float32
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS // ACROSS, ACROSS], [16, 8])
    NEAR: gl.constexpr = neighbours(BITS, EXACT)
    LW: gl.constexpr = gl.DotOperandLayout(0, L, NEAR)
    LH: gl.constexpr = gl.DotOperandLayout(1, L, NEAR)
    group = gl.program_id(0) // MEMBERS
    member = gl.program_id(0) % MEMBERS
    CHUNKS: gl.constexpr = WIDTH // CHUNK
    row = member * UNITS + gl.arange(0, UNITS, layout=gl.SliceLayout(1, LW))[:, None]
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LW))[None, :]
    HELD: gl.constexpr = (4 if LSTM else 3) - SHARED_GATES  # first gate whose weights are in shared memory
    w0 = weights(w_hh, row, column, 0, CHUNKS, HELD, HIDDEN, BITS, EXACT, False)
    w1 = weights(w_hh, row, column, 1, CHUNKS, HELD, HIDDEN, BITS, EXACT, False)
    w2 = weights(w_hh, row, column, 2, CHUNKS, HELD, HIDDEN, BITS, EXACT, False)
    if LSTM:
        w3 = weights(w_hh, row, column, 3, CHUNKS, HELD, HIDDEN, BITS, EXACT, False)
    exchange = gl.allocate_shared_memory(KIND, [2 if MEMBERS == 1 else 1, ROWS, EXTENT], page_layout(BITS, EXACT))
    j = member * UNITS + gl.arange(0, UNITS, layout=gl.SliceLayout(1, L))
    real = (j < HIDDEN)[:, None]
    slot = group * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
    begin = gl.load(bounds + slot)
    length = (gl.load(bounds + slot + 1) - begin).to(gl.int32)
    steps = gl.max(length, 0)
    if LSTM == 0:
        bias = gl.load(b_hn + j, mask=j < HIDDEN, other=0.0)
    some = length > 0
    first = (gl.load(starts + begin + 1, mask=length > 1, other=0) != 0) & (length > 1)
    inside = some[None, :] & real
    h = gl.load(stored_h + begin[None, :] * h_row + j[:, None] * h_column, mask=inside, other=0.0).to(gl.float32)
    if LSTM:
        c = gl.load(stored_c + begin[None, :] * c_row + j[:, None] * c_column, mask=inside, other=0.0).to(gl.float32)
    if MEMBERS == 1:
        exchange.index(0).permute((1, 0)).store(operand(h, BITS, EXACT))
    else:
        lane = gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
        buffer += group * (2 * ROWS * WIDTH)
        publish(buffer, lane[None, :], j[:, None], WIDTH, operand(h, BITS, EXACT))
        arrive(flags + group)
        wait(flags + group, MEMBERS)
        collect_chunks(buffer, exchange.index(0), ROWS, CHUNK, CHUNKS, WIDTH, WARPS)
        collected()
    padded = (j < WIDTH)[:, None]
    unit = j[:, None]
    x0, x1 = fetch(input_gates, begin[None, :], unit, some[None, :] & padded, WIDTH, LSTM, BITS)
    if AHEAD == 2:
        y0, y1 = fetch(input_gates, (begin + 1)[None, :], unit, (length > 1)[None, :] & padded, WIDTH, LSTM, BITS)
    for step in range(steps):
        token = begin + step
        ahead = step + 2 < length
        inside = (step + AHEAD < length)[None, :] & padded
        z0, z1 = fetch(input_gates, (token + AHEAD)[None, :], unit, inside, WIDTH, LSTM, BITS)
        flag = gl.load(starts + token + 2, mask=ahead, other=0)
        again = first[None, :] & real
        next_h = gl.load(stored_h + (token + 1)[None, :] * h_row + j[:, None] * h_column, mask=again, other=0.0)
        if LSTM:
            next_c = gl.load(stored_c + (token + 1)[None, :] * c_row + j[:, None] * c_column, mask=again, other=0.0)
        page = exchange.index(step % 2 if MEMBERS == 1 else 0)
        a0, a1 = two_of(x0, BITS)
        if LSTM:
            a2, a3 = two_of(x1, BITS)
        else:
            a2 = gl.zeros([UNITS, ROWS], gl.float32, L) + bias[:, None]
        for chunk in gl.static_range(CHUNKS):
            high, low = split(page.slice(chunk * CHUNK, CHUNK, 1).permute((1, 0)).load(LH), EXACT)
            if LSTM:
                a3 = weighted(w3, 3, chunk, high, low, a3, HELD, LW, EXACT)
            a2 = weighted(w2, 2, chunk, high, low, a2, HELD, LW, EXACT)
            a0 = weighted(w0, 0, chunk, high, low, a0, HELD, LW, EXACT)
            a1 = weighted(w1, 1, chunk, high, low, a1, HELD, LW, EXACT)
        if LSTM:
            g0, g1, g2, g3, c, h = lstm_step(a0, a1, a2, a3, c, EXACT)
            out_c = c
        else:
            g0, g1, g2, g3, h = gru_step(a0, a1, x1.to(gl.float32), a2, h, EXACT)
        out_h = h
        h = gl.where(first[None, :], next_h.to(gl.float32), h)
        if LSTM:
            c = gl.where(first[None, :], next_c.to(gl.float32), c)
        if MEMBERS == 1:
            exchange.index((step + 1) % 2).permute((1, 0)).store(operand(h, BITS, EXACT))
        else:
            publish(buffer + ((step + 1) % 2) * (ROWS * WIDTH), lane[None, :], unit, WIDTH, operand(h, BITS, EXACT))
            arrive(flags + group)
        active = (step < length)[None, :]
        out = token[None, :] * HIDDEN + j[:, None]
        gl.store(after_h + out, out_h, mask=active & real)
        if LSTM:
            gl.store(after_c + out, out_c, mask=active & real)
        if KEEP:
            store_kept(gates, token[None, :] * WIDTH + j[:, None], active & padded, g0, g1, g2, g3, EXACT)
        if MEMBERS > 1:
            wait(flags + group, (step + 2) * MEMBERS)
            mail = buffer + ((step + 1) % 2) * (ROWS * WIDTH)
            collect_chunks(mail, exchange.index(0), ROWS, CHUNK, CHUNKS, WIDTH, WARPS)
            collected()
        if AHEAD == 2:
            x0 = y0
            x1 = y1
            y0 = z0
            y1 = z1
        else:
            x0 = z0
            x1 = z1
        first = (flag != 0) & ahead
