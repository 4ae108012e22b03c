# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, PLR0913, PLR0915
# Kernel bodies are a language of their own: Triton's types are known to its compiler alone, and a body is one function,
# however long, with all its arguments.
"""The backward recurrence in Gluon for many rows or many units: a matrix product per step, tiles of rows and units."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from recurl.recurrence.triton.registers import (
    arrive,
    gru_back,
    kept_of,
    load_kept,
    lstm_back,
    store_gradients,
    wait,
)
from recurl.recurrence.triton.wide_product import bring_first, multiply, publish_operand


@gluon.jit
def wide_backward_kernel(
    grad_h,
    gh_row,
    gh_column,
    grad_c,
    gc_row,
    gc_column,
    gates,
    weights,
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
    ROWS: gl.constexpr,
    UNITS: gl.constexpr,
    STAGES: gl.constexpr,
    PAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Walk ROWS slots from their last token to their first; see ``resident_backward.resident_backward_kernel``.

    Differences: as those of ``wide_forward.wide_forward_kernel``; ``weights`` ``[WIDTH, G * WIDTH]`` stand as
    ``arrange.pack_kernel`` leaves them.
    """
    KIND: gl.constexpr = gl.bfloat16 if BITS == 16 else gl.float32
    MEMBERS: gl.constexpr = WIDTH // UNITS
    PARTS: gl.constexpr = 2 if EXACT else 1
    STRIDE: gl.constexpr = PARTS * (4 if LSTM else 3) * WIDTH
    COLUMNS: gl.constexpr = 1024 // BITS
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, UNITS, 256 // BITS])
    PAGE: gl.constexpr = gl.NVMMASharedLayout(128, BITS)
    group = gl.program_id(0) // MEMBERS
    member = gl.program_id(0) % MEMBERS
    row_pages = gl.allocate_shared_memory(KIND, [PARTS * STAGES, ROWS, COLUMNS], PAGE)
    pages = gl.allocate_shared_memory(KIND, [PARTS * PAGES, UNITS, COLUMNS], PAGE)
    weights += member * (UNITS * STRIDE)
    buffer += group * (2 * ROWS * STRIDE)
    flags += group
    j = member * UNITS + gl.arange(0, UNITS, layout=gl.SliceLayout(0, L))
    unit = j[None, :]
    real = unit < HIDDEN
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    begin = gl.load(bounds + group * ROWS + lane)
    end = gl.load(bounds + group * ROWS + lane + 1)
    length = (end - begin).to(gl.int32)
    steps = gl.max(length, 0)
    after = after_c if LSTM else after_h
    carried = gl.zeros([ROWS, UNITS], gl.float32, L)
    for step in range(steps):
        active = step < length
        token = end - 1 - step
        inside = active[:, None] & real
        first = (gl.load(starts + token, mask=active, other=0) != 0) & active
        packed, more = load_kept(gates, token[:, None] * WIDTH + unit, active[:, None], EXACT)
        dh = gl.load(grad_h + token[:, None] * gh_row + unit * gh_column, mask=inside, other=0.0).to(gl.float32)
        before_from = gl.where(first, stored + token * stored_row, after + (token - 1) * HIDDEN)[:, None]
        before = gl.load(before_from + unit * gl.where(first, stored_column, 1)[:, None], mask=inside, other=0.0)
        if LSTM:
            dc = gl.load(grad_c + token[:, None] * gc_row + unit * gc_column, mask=inside, other=0.0).to(gl.float32)
            state = gl.load(after + token[:, None] * HIDDEN + unit, mask=inside, other=0.0)
        if step > 0:
            wait(flags, step * MEMBERS)
        if LSTM:
            carried += dc
        if step > 0:
            rows = buffer + (step % 2) * (ROWS * STRIDE)
            dh, _ = multiply(rows, weights, weights, row_pages, pages, None, dh, dh, COLUMNS, STRIDE, WARPS, EXACT)
        g0, g1, g2, g3 = kept_of(packed, more, EXACT)
        if LSTM:
            d0, d1, d2, d3, carried = lstm_back(g0, g1, g2, g3, state, before, dh, carried, EXACT)
        else:
            d0, d1, d2, d3, carried = gru_back(g0, g1, g2, g3, before, dh + carried)
        mail = buffer + ((step + 1) % 2) * (ROWS * STRIDE)
        # A segment's first token passes nothing on to the token before it.
        linked = (active & (first == 0))[:, None]
        publish_operand(mail, lane[:, None], unit, STRIDE, gl.where(linked, d0, 0.0), BITS, EXACT)
        publish_operand(mail + WIDTH, lane[:, None], unit, STRIDE, gl.where(linked, d1, 0.0), BITS, EXACT)
        publish_operand(mail + 2 * WIDTH, lane[:, None], unit, STRIDE, gl.where(linked, d2, 0.0), BITS, EXACT)
        if LSTM:
            publish_operand(mail + 3 * WIDTH, lane[:, None], unit, STRIDE, gl.where(linked, d3, 0.0), BITS, EXACT)
        arrive(flags)
        if step == 0:
            bring_first(weights, weights, pages, None, COLUMNS, STRIDE, STAGES, WARPS, EXACT, AGAIN=False)
        else:
            bring_first(weights, weights, pages, None, COLUMNS, STRIDE, STAGES, WARPS, EXACT, AGAIN=True)
        store_gradients(grad_gates, token[:, None], unit, active[:, None], d0, d1, d2, d3, WIDTH, LSTM, BITS)
        if TO_STORED:
            gl.store(grad_stored + token[:, None] * HIDDEN + unit, carried, mask=first[:, None] & real)
        carried = gl.where(linked, carried, 0.0)
    async_copy.wait_group(0)
