# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, PLR0915, RUF005
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Forward recurrence in Gluon for many rows or many units: a matrix product per step, tiles of rows and units.

A program computes UNITS hidden units of ROWS slots, with all their gates. It keeps its weights in shared memory where
they fit, and c in registers; h goes through a buffer in global memory. What it computes is
:func:`recurl.recurrence.cuda.definition.forward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from recurl.recurrence.cuda.registers import (
    arrive,
    fetch,
    gru_step,
    lstm_step,
    store_kept,
    two_of,
    wait,
)
from recurl.recurrence.cuda.tiles.product import REGISTERS, bring_first, hold, multiply, publish_operand


@gluon.jit
def _two_gates(mixed, ROWS: gl.constexpr, UNITS: gl.constexpr, L: gl.constexpr):
    # [ROWS, 2 * UNITS], eight columns of each gate in turn, to two [ROWS, UNITS]: values stay in their threads.
    first, second = gl.split(mixed.reshape([ROWS, UNITS // 8, 2, 8]).permute((0, 1, 3, 2)))
    first = gl.convert_layout(first.reshape([ROWS, UNITS]), L, assert_trivial=True)
    return first, gl.convert_layout(second.reshape([ROWS, UNITS]), L, assert_trivial=True)


@gluon.jit
def _four_gates(mixed, ROWS: gl.constexpr, UNITS: gl.constexpr, L: gl.constexpr, LP: gl.constexpr):
    # [ROWS, 4 * UNITS], sixteen columns of gates 0 and 1 and sixteen of 2 and 3 in turn, to four [ROWS, UNITS].
    first, second = gl.split(mixed.reshape([ROWS, UNITS // 8, 2, 16]).permute((0, 1, 3, 2)))
    first = gl.convert_layout(first.reshape([ROWS, 2 * UNITS]), LP, assert_trivial=True)
    second = gl.convert_layout(second.reshape([ROWS, 2 * UNITS]), LP, assert_trivial=True)
    a0, a1 = _two_gates(first, ROWS, UNITS, L)
    a2, a3 = _two_gates(second, ROWS, UNITS, L)
    return a0, a1, a2, a3


@gluon.jit
def _walk(
    group,
    member,
    row_pages,
    pages,
    other_pages,
    tensors,
    HIDDEN: gl.constexpr,
    WIDTH: gl.constexpr,
    LSTM: gl.constexpr,
    KEEP: gl.constexpr,
    BITS: gl.constexpr,
    EXACT: gl.constexpr,
    ROWS: gl.constexpr,
    UNITS: gl.constexpr,
    STAGES: gl.constexpr,
    TAKEN: gl.constexpr,
    PAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    # Run the slots of one group, with weights that are held, or streamed from now on.
    input_gates, b_hn, weights, other, stored_h, h_row, h_column, stored_c, c_row, c_column = tensors[:10]
    starts, bounds, after_h, after_c, gates, buffer, flags = tensors[10:]
    GATE_BITS: gl.constexpr = input_gates.dtype.element_ty.primitive_bitwidth
    MEMBERS: gl.constexpr = WIDTH // UNITS
    COLUMNS: gl.constexpr = 1024 // BITS
    STRIDE: gl.constexpr = 2 * WIDTH if EXACT else WIDTH
    HELD: gl.constexpr = PAGES * COLUMNS == WIDTH
    MIXED: gl.constexpr = 4 * UNITS if LSTM else 2 * UNITS
    ACROSS: gl.constexpr = 16 * WARPS // ROWS
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, ACROSS], [16, UNITS // ACROSS, 256 // BITS])
    LP: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, ACROSS], [16, 2 * UNITS // ACROSS, 256 // BITS])
    LM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, ACROSS], [16, MIXED // ACROSS, 256 // BITS])
    buffer += group * (2 * ROWS * STRIDE)
    flags += group
    j = member * UNITS + gl.arange(0, UNITS, layout=gl.SliceLayout(0, L))
    unit = j[None, :]
    real = unit < HIDDEN
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    begin = gl.load(bounds + group * ROWS + lane)
    length = (gl.load(bounds + group * ROWS + lane + 1) - begin).to(gl.int32)
    steps = gl.max(length, 0)
    if LSTM == 0:
        bias = gl.load(b_hn + j, mask=j < HIDDEN, other=0.0)
    some = (length > 0)[:, None]
    first = (gl.load(starts + begin + 1, mask=length > 1, other=0) != 0) & (length > 1)
    h = gl.load(stored_h + begin[:, None] * h_row + unit * h_column, mask=some & real, other=0.0).to(gl.float32)
    if LSTM:
        c = gl.load(stored_c + begin[:, None] * c_row + unit * c_column, mask=some & real, other=0.0).to(gl.float32)
    publish_operand(buffer, lane[:, None], unit, STRIDE, h, BITS, EXACT)
    arrive(flags)
    if not HELD:
        bring_first(weights, other, pages, other_pages, COLUMNS, STRIDE, STAGES, TAKEN, WARPS, EXACT)
    x0, x1 = fetch(input_gates, begin[:, None], unit, some, WIDTH, LSTM, GATE_BITS)
    wait(flags, MEMBERS)
    for step in range(steps):
        token = (begin + step)[:, None]
        active = (step < length)[:, None]
        mixed = gl.zeros([ROWS, MIXED], gl.float32, LM)
        rest = gl.zeros([ROWS, UNITS], gl.float32, L)
        rows = buffer + (step % 2) * (ROWS * STRIDE)
        mixed, rest = multiply(
            rows,
            weights,
            other,
            row_pages,
            pages,
            other_pages,
            mixed,
            rest,
            COLUMNS,
            STRIDE,
            WIDTH,
            TAKEN,
            WARPS,
            EXACT,
        )
        again = first[:, None] & real
        next_h = gl.load(stored_h + (token + 1) * h_row + unit * h_column, mask=again, other=0.0).to(gl.float32)
        i0, i1 = two_of(x0, GATE_BITS)
        if LSTM:
            next_c = gl.load(stored_c + (token + 1) * c_row + unit * c_column, mask=again, other=0.0).to(gl.float32)
            a0, a1, a2, a3 = _four_gates(mixed, ROWS, UNITS, L, LP)
            i2, i3 = two_of(x1, GATE_BITS)
            g0, g1, g2, g3, out_c, out_h = lstm_step(a0 + i0, a1 + i1, a2 + i2, a3 + i3, c, EXACT)
            c = gl.where(first[:, None], next_c, out_c)
        else:
            a0, a1 = _two_gates(mixed, ROWS, UNITS, L)
            g0, g1, g2, g3, out_h = gru_step(a0 + i0, a1 + i1, x1.to(gl.float32), rest + bias[None, :], h, EXACT)
        h = gl.where(first[:, None], next_h, out_h)
        mail = buffer + ((step + 1) % 2) * (ROWS * STRIDE)
        publish_operand(mail, lane[:, None], unit, STRIDE, h, BITS, EXACT)
        arrive(flags)
        if not HELD:
            bring_first(weights, other, pages, other_pages, COLUMNS, STRIDE, STAGES, TAKEN, WARPS, EXACT)
        gl.store(after_h + token * HIDDEN + unit, out_h, mask=active & real)
        if LSTM:
            gl.store(after_c + token * HIDDEN + unit, out_c, mask=active & real)
        if KEEP:
            store_kept(gates, token * WIDTH + unit, active, g0, g1, g2, g3, EXACT)
        ahead = step + 1 < length
        x0, x1 = fetch(input_gates, token + 1, unit, ahead[:, None], WIDTH, LSTM, GATE_BITS)
        first = (gl.load(starts + begin + step + 2, mask=step + 2 < length, other=0) != 0) & (step + 2 < length)
        wait(flags, (step + 2) * MEMBERS)
    async_copy.wait_group(0)


@gluon.jit
def tiles_forward_kernel(
    input_gates,
    b_hn,
    weights,
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
    ROWS: gl.constexpr,
    UNITS: gl.constexpr,
    STAGES: gl.constexpr,
    TAKEN: gl.constexpr,
    PAGES: gl.constexpr,
    WALKS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Run ROWS slots with the programs of a group; see ``resident_forward.resident_forward_kernel``.

    Differences: ``weights`` ``[G * WIDTH, WIDTH]`` are rounded and packed by ``arrange.pack_kernel``. h is streamed
    through STAGES pages of shared memory; the weights are streamed through PAGES, or stay there if each of their blocks
    has a page. Gates are [slots, units]; one product computes all of the LSTM's, two those of the GRU. With EXACT, h
    and the weights have twice the columns, see ``product.multiply``. With two WALKS, the program serves two
    groups, each with its own warps: while one waits, the other computes.
    """
    KIND: gl.constexpr = buffer.dtype.element_ty
    MEMBERS: gl.constexpr = WIDTH // UNITS
    COLUMNS: gl.constexpr = 1024 // BITS
    PARTS: gl.constexpr = 2 if EXACT else 1
    STRIDE: gl.constexpr = PARTS * WIDTH
    MIXED: gl.constexpr = 4 * UNITS if LSTM else 2 * UNITS
    PAGE: gl.constexpr = gl.NVMMASharedLayout(128, BITS)
    group = gl.program_id(0) // MEMBERS
    member = gl.program_id(0) % MEMBERS
    row_pages = gl.allocate_shared_memory(KIND, [PARTS * STAGES, ROWS, COLUMNS], PAGE)
    pages = gl.allocate_shared_memory(KIND, [PARTS * PAGES, MIXED, COLUMNS], PAGE)
    if LSTM:
        other_pages: gl.constexpr = None
    else:
        other_pages = gl.allocate_shared_memory(KIND, [PARTS * PAGES, UNITS, COLUMNS], PAGE)
    other = weights + (2 * WIDTH + member * UNITS) * STRIDE
    weights += member * (MIXED * STRIDE)
    if PAGES * COLUMNS == WIDTH:
        hold(weights, other, pages, other_pages, COLUMNS, STRIDE, WARPS, EXACT)
    states = (stored_h, h_row, h_column, stored_c, c_row, c_column)
    results = (after_h, after_c, gates, buffer, flags)
    tensors = (input_gates, b_hn, weights, other) + states + (starts, bounds) + results
    if WALKS == 1:
        _walk(
            *(group, member, row_pages, pages, other_pages, tensors),
            *(HIDDEN, WIDTH, LSTM, KEEP, BITS, EXACT, ROWS, UNITS, STAGES, TAKEN, PAGES, WARPS),
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
                        other_pages,
                        tensors,
                        HIDDEN,
                        WIDTH,
                        LSTM,
                        KEEP,
                        BITS,
                        EXACT,
                        ROWS,
                        UNITS,
                        STAGES,
                        TAKEN,
                        PAGES,
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
                        other_pages,
                        tensors,
                        HIDDEN,
                        WIDTH,
                        LSTM,
                        KEEP,
                        BITS,
                        EXACT,
                        ROWS,
                        UNITS,
                        STAGES,
                        TAKEN,
                        PAGES,
                        WARPS,
                    ),
                ),
            ],
            [WARPS],
            [REGISTERS],
        )
