# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, PLR0915
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Large products in Gluon: gradients of weights in tf32, and all products accurate to float32.

Tensor cores of this generation read float32 operands from shared memory only along rows of the summed dimension. In
gradients of weights that dimension is the tokens, along columns. So one operand passes through registers, which may
transpose and split it, and the other one is transposed and split by an earlier launch.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from recurl.recurrence.cuda.registers import barrier, copy_async, split


@gluon.jit
def _bring(a, b, a_pages, pages, begin, end, a_row, rows, width, page, TURNED: gl.constexpr, WARPS: gl.constexpr):
    # Start to copy the terms of the sum from begin; a is zero from end on, and in rows past its last.
    COLUMNS: gl.constexpr = pages.shape[1]
    DEPTH: gl.constexpr = pages.shape[2]
    ROWS: gl.constexpr = a_pages.shape[2] if TURNED else a_pages.shape[1]
    PARTS: gl.constexpr = pages.shape[0] // a_pages.shape[0]
    LB: gl.constexpr = gl.BlockedLayout([1, 4], [128 // DEPTH, DEPTH // 4], [WARPS, 1], [1, 0])
    if begin < end:
        if TURNED:
            LA: gl.constexpr = gl.BlockedLayout([1, 4], [128 // ROWS, ROWS // 4], [WARPS, 1], [1, 0])
            term = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, LA))[:, None]
            row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LA))[None, :]
            a += begin.to(gl.int64) * a_row
            at = a + (term * a_row + row)
        else:
            term = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, LB))[None, :]
            row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LB))[:, None]
            at = a + begin + (row * a_row + term)
        inside = (term < end - begin) & (row < rows)
        copy_async(a_pages.index(page), at, mask=inside, cache_modifier=".cg")
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, LB))[:, None]
        term = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, LB))[None, :]
        b += begin.to(gl.int64) * (PARTS * width)
        for part in gl.static_range(PARTS):
            copy_async(pages.index(PARTS * page + part), b + (column * DEPTH + term), cache_modifier=".cg")
            b += width * DEPTH
    async_copy.commit_group()


@gluon.jit
def _values(page, LA: gl.constexpr, TURNED: gl.constexpr):
    return page.permute((1, 0)).load(LA) if TURNED else page.load(LA)


@gluon.jit
def large_product_kernel(
    a,
    b,
    bias,
    c,
    sums,
    depth,
    a_row,
    width,
    rows,
    columns,
    share,
    TURNED: gl.constexpr,
    EXACT: gl.constexpr,
    BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Write ``c[share] = a @ b`` over a share of the sum's terms; ``+ bias`` in the first one.

    a is ``[rows, depth]`` with row stride a_row, or TURNED (transposed) ``[depth, rows]``, and then its column sums are
    written to ``sums[share]``. It is rounded and split here. b is transposed, ``[blocks, parts, width, DEPTH]``, with
    DEPTH terms a block and width a multiple of COLUMNS; its parts are the tf32 values and, with EXACT, the rounding
    errors. ``share`` is a multiple of DEPTH. Program (row tile, column tile, share); c is ``[shares, rows, columns]``.
    """
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 8])
    LA: gl.constexpr = gl.DotOperandLayout(0, LC, 1)
    PARTS: gl.constexpr = 2 if EXACT else 1
    m = gl.program_id(0) * ROWS
    n = gl.program_id(1) * COLUMNS
    part = gl.program_id(2)
    begin = part * share
    end = gl.minimum(begin + share, depth)
    # Swizzled so that a warp reads eight rows of four terms without bank conflicts.
    if TURNED:
        a_pages = gl.allocate_shared_memory(gl.float32, [STAGES, DEPTH, ROWS], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
        a += m
    else:
        a_pages = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, DEPTH], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
        a += m.to(gl.int64) * a_row
    pages = gl.allocate_shared_memory(gl.float32, [PARTS * STAGES, COLUMNS, DEPTH], gl.NVMMASharedLayout(128, 32))
    b += n * DEPTH
    for page in gl.static_range(STAGES - 1):
        _bring(a, b, a_pages, pages, begin + page * DEPTH, end, a_row, rows - m, width, page, TURNED, WARPS)
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    barrier()
    value = _values(a_pages.index(0), LA, TURNED)
    total = gl.zeros_like(value)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, LC)
    for block in range((end - begin + DEPTH - 1) // DEPTH):
        here = block % STAGES
        if EXACT:
            high, low = split(value, True)
            b_high = pages.index(2 * here).permute((1, 0))
            now = warpgroup_mma(low, b_high, gl.zeros_like(acc), use_acc=False, is_async=True)
            now = warpgroup_mma(high, pages.index(2 * here + 1).permute((1, 0)), now, is_async=True)
            now = warpgroup_mma(high, b_high, now, is_async=True)
        else:
            # Rounding in one instruction: tensor cores truncate the low bits. It may lose a NaN, which total keeps.
            high = (value.to(gl.int32, bitcast=True) + 0x1000).to(gl.float32, bitcast=True)
            acc = warpgroup_mma(high, pages.index(here).permute((1, 0)), acc, is_async=True)
        if TURNED:
            total += value
        # Every warp arrives here after its previous product, whose pages are then free.
        async_copy.wait_group(STAGES - 3)
        fence_async_shared()
        barrier()
        at = begin + (block + STAGES - 1) * DEPTH
        _bring(a, b, a_pages, pages, at, end, a_row, rows - m, width, (block + STAGES - 1) % STAGES, TURNED, WARPS)
        value = _values(a_pages.index((block + 1) % STAGES), LA, TURNED)
        if EXACT:  # tensor cores truncate their sums, so they must be short
            now, high, low = warpgroup_mma_wait(0, deps=(now, high, low))
            acc += now
        else:
            acc, high = warpgroup_mma_wait(0, deps=(acc, high))
    async_copy.wait_group(0)
    row = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LC))[:, None]
    column = n + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LC))[None, :]
    if TURNED:
        total = gl.sum(total, 1)
        summed = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LA))
        gl.store(sums + part * rows + summed, total, mask=(summed < rows) & (n == 0))
        acc += gl.convert_layout(total * 0.0, gl.SliceLayout(1, LC))[:, None]
    if BIAS:
        acc += gl.load(bias + column, mask=(column < columns) & (part == 0), other=0.0)
    at = c + (part.to(gl.int64) * rows + row) * columns + column
    gl.store(at, acc, mask=(row < rows) & (column < columns))
