# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, C901, PLR0912, PLR0913, PLR0915, RUF005
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Backward recurrence in Gluon for many rows or many units: a matrix product per step, tiles of rows and units.

A program computes UNITS hidden units of ROWS slots; up to SHARES programs share the columns of a product and add up
their parts through global memory. What it computes is :func:`recurl.recurrence.cuda.definition.backward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from recurl.recurrence.cuda.registers import (
    arrive,
    gru_back,
    kept_of,
    load_kept,
    lstm_back,
    store_gradients,
    wait,
)
from recurl.recurrence.cuda.tiles.product import REGISTERS, bring_first, hold, multiply, publish_operand


@gluon.jit
def _fetch(tensors, token, unit, active, first, HIDDEN: gl.constexpr, WIDTH: gl.constexpr, LSTM: gl.constexpr, EXACT):
    # Load the inputs of a step: kept gates, gradients of h and c, the last state before and after the token.
    grad_h, gh_row, gh_column, grad_c, gc_row, gc_column, gates, stored, stored_row, stored_column, after = tensors
    inside = active[:, None] & (unit < HIDDEN)
    packed, more = load_kept(gates, token[:, None] * WIDTH + unit, active[:, None], EXACT)
    dh = gl.load(grad_h + token[:, None] * gh_row + unit * gh_column, mask=inside, other=0.0).to(gl.float32)
    before_from = gl.where(first, stored + token * stored_row, after + (token - 1) * HIDDEN)[:, None]
    before = gl.load(before_from + unit * gl.where(first, stored_column, 1)[:, None], mask=inside, other=0.0)
    dc = dh
    state = dh
    if LSTM:
        dc = gl.load(grad_c + token[:, None] * gc_row + unit * gc_column, mask=inside, other=0.0).to(gl.float32)
        state = gl.load(after + token[:, None] * HIDDEN + unit, mask=inside, other=0.0)
    return packed, more, dh, dc, before, state


@gluon.jit
def _block_place(row, column, ROWS: gl.constexpr):
    # Position of a value of [ROWS, columns] in blocks of 8 x 8; a warp's access to its products covers one block.
    return (column // 8 * (ROWS // 8) + row // 8) * 64 + row % 8 * 8 + column % 8


@gluon.jit
def _walk(
    group,
    member,
    row_pages,
    pages,
    tensors,
    HIDDEN: gl.constexpr,
    WIDTH: gl.constexpr,
    LSTM: gl.constexpr,
    TO_STORED: gl.constexpr,
    BITS: gl.constexpr,
    EXACT: gl.constexpr,
    ROWS: gl.constexpr,
    UNITS: gl.constexpr,
    SHARES: gl.constexpr,
    STAGES: gl.constexpr,
    TAKEN: gl.constexpr,
    PAGES: gl.constexpr,
    WALKS: gl.constexpr,
    WARPS: gl.constexpr,
):
    # Run the slots of one group, with weights that are held, or streamed from now on.
    read = tensors[:11]
    weights, starts, bounds, grad_gates, grad_stored, buffer, flags, sums = tensors[11:]
    MEMBERS: gl.constexpr = WIDTH // UNITS
    STRIDE: gl.constexpr = (2 if EXACT else 1) * (4 if LSTM else 3) * WIDTH
    COLUMNS: gl.constexpr = 1024 // BITS
    LENGTH: gl.constexpr = (4 if LSTM else 3) * WIDTH // SHARES
    HELD: gl.constexpr = PAGES * COLUMNS == LENGTH
    TILE: gl.constexpr = SHARES * UNITS
    ACROSS: gl.constexpr = 16 * WARPS // ROWS
    LT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, ACROSS], [16, TILE // ACROSS, 256 // BITS])
    if SHARES == 1:
        L: gl.constexpr = LT
    else:  # sums are read from memory, so units may be in memory order: eight or sixteen threads along a row
        L: gl.constexpr = gl.BlockedLayout([1, 2], [64 // UNITS, UNITS // 2], [WARPS, 1], [1, 0])
    tile = member // SHARES
    share = member % SHARES
    buffer += group * (2 * ROWS * STRIDE)
    tile_flags = flags + gl.num_programs(0) // MEMBERS * WALKS + group * (MEMBERS // SHARES) + tile
    flags += group
    j = member * UNITS + gl.arange(0, UNITS, layout=gl.SliceLayout(0, L))
    unit = j[None, :]
    real = unit < HIDDEN
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    begin = gl.load(bounds + group * ROWS + lane)
    end = gl.load(bounds + group * ROWS + lane + 1)
    length = (end - begin).to(gl.int32)
    steps = gl.max(length, 0)
    carried = gl.zeros([ROWS, UNITS], gl.float32, L)
    sums += (group * MEMBERS + tile * SHARES) * (ROWS * TILE)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LT))[:, None]
    part_at = _block_place(row, gl.arange(0, TILE, layout=gl.SliceLayout(0, LT))[None, :], ROWS)
    sum_at = _block_place(lane[:, None], share * UNITS + unit % UNITS, ROWS)
    first = (gl.load(starts + end - 1, mask=length > 0, other=0) != 0) & (length > 0)
    later = gl.load(starts + end - 2, mask=length > 1, other=0)
    packed, more, dh, dc, before, state = _fetch(read, end - 1, unit, length > 0, first, HIDDEN, WIDTH, LSTM, EXACT)
    for step in range(steps):
        active = step < length
        token = end - 1 - step
        if step > 0:
            wait(flags, step * MEMBERS)
        if LSTM:
            carried += dc
        if step > 0:
            rows = buffer + (step % 2) * (ROWS * STRIDE) + share * LENGTH
            if SHARES == 1:
                dh, _ = multiply(
                    rows, weights, weights, row_pages, pages, None, dh, dh, COLUMNS, STRIDE, LENGTH, TAKEN, WARPS, EXACT
                )
            else:
                part = gl.zeros([ROWS, TILE], gl.float32, LT)
                part, _ = multiply(
                    rows,
                    weights,
                    weights,
                    row_pages,
                    pages,
                    None,
                    part,
                    part,
                    COLUMNS,
                    STRIDE,
                    LENGTH,
                    TAKEN,
                    WARPS,
                    EXACT,
                )
                gl.store(sums + share * (ROWS * TILE) + part_at, part)
                arrive(tile_flags)
                wait(tile_flags, step * SHARES)
                for other in gl.static_range(SHARES):
                    dh += gl.load(sums + other * (ROWS * TILE) + sum_at, cache_modifier=".cg")
        g0, g1, g2, g3 = kept_of(packed, more, EXACT)
        if LSTM:
            d0, d1, d2, d3, carried = lstm_back(g0, g1, g2, g3, state, before, dh, carried, EXACT)
        else:
            d0, d1, d2, d3, carried = gru_back(g0, g1, g2, g3, before, dh + carried)
        mail = buffer + ((step + 1) % 2) * (ROWS * STRIDE)
        # The first token of a segment passes no gradient to the previous token.
        linked = (active & (first == 0))[:, None]
        publish_operand(mail, lane[:, None], unit, STRIDE, gl.where(linked, d0, 0.0), BITS, EXACT)
        publish_operand(mail + WIDTH, lane[:, None], unit, STRIDE, gl.where(linked, d1, 0.0), BITS, EXACT)
        publish_operand(mail + 2 * WIDTH, lane[:, None], unit, STRIDE, gl.where(linked, d2, 0.0), BITS, EXACT)
        if LSTM:
            publish_operand(mail + 3 * WIDTH, lane[:, None], unit, STRIDE, gl.where(linked, d3, 0.0), BITS, EXACT)
        arrive(flags)
        if not HELD:
            bring_first(weights, weights, pages, None, COLUMNS, STRIDE, STAGES, TAKEN, WARPS, EXACT)
        next_first = (later != 0) & (step + 1 < length)
        later = gl.load(starts + token - 2, mask=step + 2 < length, other=0)
        packed, more, dh, dc, before, state = _fetch(
            read, token - 1, unit, step + 1 < length, next_first, HIDDEN, WIDTH, LSTM, EXACT
        )
        store_gradients(grad_gates, token[:, None], unit, active[:, None], d0, d1, d2, d3, WIDTH, LSTM, BITS)
        if TO_STORED:
            gl.store(grad_stored + token[:, None] * HIDDEN + unit, carried, mask=first[:, None] & real)
        carried = gl.where(linked, carried, 0.0)
        first = next_first
    async_copy.wait_group(0)


@gluon.jit
def tiles_backward_kernel(
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
    sums,
    HIDDEN: gl.constexpr,
    WIDTH: gl.constexpr,
    LSTM: gl.constexpr,
    TO_STORED: gl.constexpr,
    BITS: gl.constexpr,
    EXACT: gl.constexpr,
    ROWS: gl.constexpr,
    UNITS: gl.constexpr,
    SHARES: gl.constexpr,
    STAGES: gl.constexpr,
    TAKEN: gl.constexpr,
    PAGES: gl.constexpr,
    WALKS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Run ROWS slots from their last token to their first; see ``resident_backward.resident_backward_kernel``.

    Differences: as for ``forward.tiles_forward_kernel``; ``weights`` ``[WIDTH, G * WIDTH]`` are packed by
    ``arrange.pack_kernel``. SHARES programs each multiply a part of the columns for the units of all of them, and add
    their results through ``sums`` ``[groups, WIDTH // UNITS, ROWS, SHARES * UNITS]``, float32.
    """
    KIND: gl.constexpr = gl.bfloat16 if BITS == 16 else gl.float32
    MEMBERS: gl.constexpr = WIDTH // UNITS
    PARTS: gl.constexpr = 2 if EXACT else 1
    STRIDE: gl.constexpr = PARTS * (4 if LSTM else 3) * WIDTH
    COLUMNS: gl.constexpr = 1024 // BITS
    LENGTH: gl.constexpr = (4 if LSTM else 3) * WIDTH // SHARES
    TILE: gl.constexpr = SHARES * UNITS
    PAGE: gl.constexpr = gl.NVMMASharedLayout(128, BITS)
    group = gl.program_id(0) // MEMBERS
    member = gl.program_id(0) % MEMBERS
    row_pages = gl.allocate_shared_memory(KIND, [PARTS * STAGES, ROWS, COLUMNS], PAGE)
    pages = gl.allocate_shared_memory(KIND, [PARTS * PAGES, TILE, COLUMNS], PAGE)
    weights += member // SHARES * (TILE * STRIDE) + member % SHARES * LENGTH
    if PAGES * COLUMNS == LENGTH:
        hold(weights, weights, pages, None, COLUMNS, STRIDE, WARPS, EXACT)
    read = (grad_h, gh_row, gh_column, grad_c, gc_row, gc_column, gates, stored, stored_row, stored_column)
    after = after_c if LSTM else after_h
    tensors = read + (after, weights, starts, bounds, grad_gates, grad_stored, buffer, flags, sums)
    if WALKS == 1:
        _walk(
            *(group, member, row_pages, pages, tensors),
            *(HIDDEN, WIDTH, LSTM, TO_STORED, BITS, EXACT, ROWS, UNITS, SHARES, STAGES, TAKEN, PAGES, WALKS, WARPS),
        )
    else:
        more_pages = gl.allocate_shared_memory(KIND, [PARTS * STAGES, ROWS, COLUMNS], PAGE)
        # Written out twice: constants in a named tuple lose their constexpr type (Triton 3.6) or are rejected (3.8).
        gl.warp_specialize(
            [
                (
                    _walk,
                    (
                        2 * group,
                        member,
                        row_pages,
                        pages,
                        tensors,
                        HIDDEN,
                        WIDTH,
                        LSTM,
                        TO_STORED,
                        BITS,
                        EXACT,
                        ROWS,
                        UNITS,
                        SHARES,
                        STAGES,
                        TAKEN,
                        PAGES,
                        WALKS,
                        WARPS,
                    ),
                ),
                (
                    _walk,
                    (
                        2 * group + 1,
                        member,
                        more_pages,
                        pages,
                        tensors,
                        HIDDEN,
                        WIDTH,
                        LSTM,
                        TO_STORED,
                        BITS,
                        EXACT,
                        ROWS,
                        UNITS,
                        SHARES,
                        STAGES,
                        TAKEN,
                        PAGES,
                        WALKS,
                        WARPS,
                    ),
                ),
            ],
            [WARPS],
            [REGISTERS],
        )
