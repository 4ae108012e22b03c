# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913
# Kernel bodies are a language of their own: Triton's types are known to its compiler alone, and a body is one function,
# however long, with all its arguments.
"""Products over all tokens in Gluon: the gradients of weights in tf32.

Tensor cores of this generation read float32 operands from shared memory by rows of the sum alone, which here runs over
tokens, down the columns. So the wider operand, the gradients of the gates, goes through registers, and the other one
is turned beforehand.
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

from recurl.recurrence.triton.registers import barrier, copy_async


@gluon.jit
def _bring(a, turned, a_pages, pages, begin, end, a_row, rows, width, page, WARPS: gl.constexpr):
    # Start to copy the tokens from begin on; for those of a from end on, and for columns past its rows, stand zeros.
    DEPTH: gl.constexpr = a_pages.shape[1]
    ROWS: gl.constexpr = a_pages.shape[2]
    COLUMNS: gl.constexpr = pages.shape[1]
    LA: gl.constexpr = gl.BlockedLayout([1, 4], [128 // ROWS, ROWS // 4], [WARPS, 1], [1, 0])
    LB: gl.constexpr = gl.BlockedLayout([1, 4], [128 // DEPTH, DEPTH // 4], [WARPS, 1], [1, 0])
    if begin < end:
        token = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, LA))[:, None]
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LA))[None, :]
        a += begin.to(gl.int64) * a_row
        inside = (token < end - begin) & (row < rows)
        copy_async(a_pages.index(page), a + (token * a_row + row), mask=inside, cache_modifier=".cg")
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, LB))[:, None]
        token = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, LB))[None, :]
        turned += begin.to(gl.int64) * width
        copy_async(pages.index(page), turned + (column * DEPTH + token), cache_modifier=".cg")
    async_copy.commit_group()


@gluon.jit
def token_product_kernel(
    a,
    turned,
    c,
    sums,
    tokens,
    a_row,
    width,
    rows,
    columns,
    share,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Write ``c[share] = a.T @ b`` over a share of the tokens, and the sums of a's columns, ``sums[share]``.

    a is ``[tokens, rows]``, with a_row numbers from token to token, rounded to tf32 here. b comes rounded and turned,
    ``[blocks, width, DEPTH]``, DEPTH tokens a block, width a multiple of COLUMNS. ``share`` is a multiple of DEPTH.
    Program (tile of rows, tile of columns, share); c is ``[shares, rows, columns]``, float32.
    """
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 8])
    LA: gl.constexpr = gl.DotOperandLayout(0, LC, 1)
    m = gl.program_id(0) * ROWS
    n = gl.program_id(1) * COLUMNS
    part = gl.program_id(2)
    begin = part * share
    end = gl.minimum(begin + share, tokens)
    # Shifted by eight numbers from token to token: threads of a warp read eight rows of four tokens without conflicts.
    a_pages = gl.allocate_shared_memory(gl.float32, [STAGES, DEPTH, ROWS], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
    pages = gl.allocate_shared_memory(gl.float32, [STAGES, COLUMNS, DEPTH], gl.NVMMASharedLayout(128, 32))
    a += m
    turned += n * DEPTH
    for page in gl.static_range(STAGES - 1):
        _bring(a, turned, a_pages, pages, begin + page * DEPTH, end, a_row, rows - m, width, page, WARPS)
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    barrier()
    value = a_pages.index(0).permute((1, 0)).load(LA)
    total = gl.zeros_like(value)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, LC)
    blocks = (end - begin + DEPTH - 1) // DEPTH
    for block in range(blocks):
        # Rounding in one instruction: tensor cores cut the low bits off. It may lose a NaN, which total keeps.
        operand = (value.to(gl.int32, bitcast=True) + 0x1000).to(gl.float32, bitcast=True)
        acc = warpgroup_mma(operand, pages.index(block % STAGES).permute((1, 0)), acc, is_async=True)
        total += value
        # Every warp comes here after its product before this one, whose pages are free then.
        async_copy.wait_group(STAGES - 3)
        fence_async_shared()
        barrier()
        at = begin + (block + STAGES - 1) * DEPTH
        _bring(a, turned, a_pages, pages, at, end, a_row, rows - m, width, (block + STAGES - 1) % STAGES, WARPS)
        value = a_pages.index((block + 1) % STAGES).permute((1, 0)).load(LA)
        acc, operand = warpgroup_mma_wait(0, deps=(acc, operand))
    async_copy.wait_group(0)
    total = gl.sum(total, 1)
    summed = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LA))
    gl.store(sums + part * rows + summed, total, mask=(summed < rows) & (n == 0))
    row = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LC))[:, None]
    column = n + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LC))[None, :]
    acc += gl.convert_layout(total * 0.0, gl.SliceLayout(1, LC))[:, None]
    at = c + (part.to(gl.int64) * rows + row) * columns + column
    gl.store(at, acc, mask=(row < rows) & (column < columns))
