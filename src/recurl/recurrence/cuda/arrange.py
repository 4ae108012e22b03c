# pyright: basic, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Kernels that arrange weights in the order that kernels and large products share, and restore their gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.cuda.parts import operand


@triton.jit
def _place(gate, unit, WIDTH: tl.constexpr, LSTM: tl.constexpr, INTERLEAVED: tl.constexpr, HIDDEN_PART: tl.constexpr):
    # The column of (gate, unit) in the input or hidden product, as listed by ``GateLayout.columns``.
    if LSTM:
        place = unit * 4 + gate if INTERLEAVED else gate * WIDTH + unit
    else:
        mixed = unit * 2 + gate if INTERLEAVED else gate * WIDTH + unit
        if HIDDEN_PART:
            place = tl.where(gate == 2, 2 * WIDTH + unit, mixed)
        else:
            place = tl.where(gate == 2, unit, WIDTH + mixed)
    return place


@triton.jit
def arrange_kernel(
    w,
    b_ih,
    b_hh,
    weight,
    bias,
    columns,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LSTM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_BIAS: tl.constexpr,
    HIDDEN_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ROWS rows of ``weight`` ``[G * WIDTH, columns]`` from w ``[G * HIDDEN, columns]``, and add the biases."""
    GATES: tl.constexpr = 4 if LSTM else 3
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # gate-major, WIDTH units per gate
    gate = row // WIDTH
    unit = row % WIDTH
    there = row < GATES * WIDTH
    real = there & (unit < HIDDEN)
    source = gate * HIDDEN + unit
    to = _place(gate, unit, WIDTH, LSTM, INTERLEAVED, False)
    begin = columns * 0
    while begin < columns:
        column = begin + tl.arange(0, BLOCK)
        inside = (column < columns)[None, :]
        at = w + source[:, None] * columns + column[None, :]
        value = tl.load(at, mask=real[:, None] & inside, other=0.0)
        at = weight + to[:, None] * columns + column[None, :]
        tl.store(at, value.to(weight.dtype.element_ty), mask=there[:, None] & inside)
        begin += BLOCK
    if IN_BIAS or HIDDEN_BIAS:
        total = tl.full([ROWS], 0.0, tl.float32)
        if IN_BIAS:
            total += tl.load(b_ih + source, mask=real, other=0.0).to(tl.float32)
        if HIDDEN_BIAS:
            added = real if LSTM else real & (gate < 2)
            total += tl.load(b_hh + source, mask=added, other=0.0).to(tl.float32)
        tl.store(bias + to, total.to(bias.dtype.element_ty), mask=there)


@triton.jit
def _copy_row(source, to, from_row, to_row, columns, BLOCK: tl.constexpr):
    begin = columns * 0
    while begin < columns:
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(source + from_row * columns + column, mask=column < columns, other=0.0)
        tl.store(to + to_row * columns + column, value.to(tl.float32), mask=column < columns)
        begin += BLOCK


@triton.jit
def _total(sums, column, programs, columns: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.full([BLOCK], 0.0, tl.float32)
    begin = programs * 0
    while begin < programs:
        program = begin + tl.arange(0, BLOCK)
        total += tl.load(sums + program * columns + column, mask=program < programs, other=0.0)
        begin += BLOCK
    return tl.sum(total, 0)


@triton.jit
def restore_kernel(
    to_w_ih,
    to_w_hh,
    w_ih,
    w_hh,
    sums,
    b_ih,
    b_hh,
    programs,
    in_columns,
    hidden_columns,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    LSTM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write row ``program_id(0)`` of the gradients of weights and biases in the order of torch.nn.

    ``sums`` ``[programs, 4 * WIDTH]`` are partial sums over tokens. With 0 programs or columns nothing is written.
    """
    row = tl.program_id(0)
    gate = row // HIDDEN
    unit = row % HIDDEN
    to_input = _place(gate, unit, WIDTH, LSTM, INTERLEAVED, False)
    to_hidden = _place(gate, unit, WIDTH, LSTM, INTERLEAVED, True)
    _copy_row(to_w_ih, w_ih, to_input, row, in_columns, BLOCK)
    _copy_row(to_w_hh, w_hh, to_hidden, row, hidden_columns, BLOCK)
    if programs > 0:
        FIRST: tl.constexpr = 0 if LSTM else WIDTH  # first column of the hidden part
        tl.store(b_ih + row, _total(sums, to_input, programs, 4 * WIDTH, BLOCK))
        tl.store(b_hh + row, _total(sums, FIRST + to_hidden, programs, 4 * WIDTH, BLOCK))


@triton.jit
def pack_kernel(
    w_hh,
    packed,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    GATES: tl.constexpr,
    FORWARD: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the recurrent weights ``[GATES * HIDDEN, HIDDEN]`` as the wide kernels read them, padded and rounded.

    Forward: ``[GATES * WIDTH, WIDTH]``, eight rows of each of four gates in turn, or of two gates and then the third.
    Backward: transposed, ``[WIDTH, GATES * WIDTH]``. With SPLIT, rows have twice the columns: the second half holds the
    rounding errors. Program (gate, row block, column block).
    """
    gate = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < HIDDEN) & (column < HIDDEN)
    exact = tl.load(w_hh + (gate * HIDDEN + row) * HIDDEN + column, mask=inside, other=0.0)
    value = operand(exact, PRECISION)
    if FORWARD:
        MIXED: tl.constexpr = GATES // 2 * 2
        mixed = (row // 8) * (8 * MIXED) + gate * 8 + row % 8
        line = tl.where(gate < MIXED, mixed, gate * WIDTH + row)
        at = column
        LENGTH: tl.constexpr = WIDTH
    else:
        line = column
        at = gate * WIDTH + row
        LENGTH: tl.constexpr = GATES * WIDTH
    if SPLIT:
        tl.store(packed + line * (2 * LENGTH) + at, value)
        tl.store(packed + line * (2 * LENGTH) + LENGTH + at, operand(exact - value, PRECISION))
    else:
        tl.store(packed + line * LENGTH + at, value)
