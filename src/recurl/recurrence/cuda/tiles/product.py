# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# ruff: noqa: ANN001, ANN201, C901, PLR0912, PLR0913, PLR0915
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Product of one step of the wide kernels: both operands are streamed from the L2 cache."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from recurl.recurrence.cuda.registers import barrier, collect, half, operand, publish, rounded, split

REGISTERS = gl.constexpr(240)  # registers per thread where 256 threads of two groups share 65,536


@gluon.jit
def bring(source, pages, block, page, COLUMNS: gl.constexpr, STRIDE: gl.constexpr, WARPS: gl.constexpr, EXACT):
    """Start to copy block ``block`` of an operand to ``page``; EXACT: both of its parts, to two pages."""
    if EXACT:
        bring(source, pages, block, 2 * page, COLUMNS, STRIDE, WARPS, False)
        bring(source + STRIDE // 2, pages, block, 2 * page + 1, COLUMNS, STRIDE, WARPS, False)
    else:
        collect(source + block * COLUMNS, pages.index(page), pages.shape[1], COLUMNS, STRIDE, WARPS)


@gluon.jit
def bring_weights(weights, other, pages, other_pages, block, page, COLUMNS, STRIDE, WARPS, EXACT: gl.constexpr):
    """Start to copy block ``block`` of a program's weights, and of the ``other`` ones if there are any."""
    bring(weights, pages, block, page, COLUMNS, STRIDE, WARPS, EXACT)
    if other_pages is not None:
        bring(other, other_pages, block, page, COLUMNS, STRIDE, WARPS, EXACT)


@gluon.jit
def hold(weights, other, pages, other_pages, COLUMNS, STRIDE, WARPS, EXACT: gl.constexpr):
    """Copy all blocks of a program's weights, if each has a page, and wait for them."""
    for block in range(pages.shape[0] // (2 if EXACT else 1)):
        bring_weights(weights, other, pages, other_pages, block, block, COLUMNS, STRIDE, WARPS, EXACT)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()


@gluon.jit
def bring_first(weights, other, pages, other_pages, COLUMNS, STRIDE, STAGES, TAKEN, WARPS, EXACT):
    """Start to copy the first blocks of the weights for :func:`multiply`, if they aren't held."""
    for block in gl.static_range(ahead_of(STAGES, TAKEN) * TAKEN):
        bring_weights(weights, other, pages, other_pages, block, block, COLUMNS, STRIDE, WARPS, EXACT)


@gluon.constexpr_function
def behind_of(STAGES, TAKEN):
    """Return how many products may still read their pages when the next one starts: the last, if pages suffice."""
    return 2 if STAGES // TAKEN > 3 else 1


@gluon.constexpr_function
def ahead_of(STAGES, TAKEN):
    """Return how many products' blocks are fetched in advance."""
    return STAGES // TAKEN - behind_of(STAGES, TAKEN)


@gluon.jit
def three(rows, row_page, weights, page, zero):
    """Return the product of two blocks of split operands, without that of the two smaller parts."""
    a = rows.index(2 * row_page)
    b = weights.index(2 * page).permute((1, 0))
    part = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
    part = warpgroup_mma(a, weights.index(2 * page + 1).permute((1, 0)), part, is_async=True)
    return warpgroup_mma(rows.index(2 * row_page + 1), b, part, is_async=True)


@gluon.jit
def multiply(
    rows,
    weights,
    other,
    row_pages,
    pages,
    other_pages,
    acc,
    other_acc,
    COLUMNS: gl.constexpr,
    STRIDE: gl.constexpr,
    LENGTH: gl.constexpr,
    TAKEN: gl.constexpr,
    WARPS: gl.constexpr,
    EXACT: gl.constexpr,
):
    """Return ``acc + rows @ weights.T`` and the same with ``other``, over LENGTH columns.

    A product takes TAKEN blocks of COLUMNS. The weights must be held (:func:`hold`), or their first blocks must be in
    flight (:func:`bring_first`). Operands have rows of STRIDE columns. EXACT: the first half of a row is rounded to
    tf32, the second half holds the rounding errors.
    """
    PARTS: gl.constexpr = 2 if EXACT else 1
    STAGES: gl.constexpr = row_pages.shape[0] // PARTS
    PAGES: gl.constexpr = pages.shape[0] // PARTS
    PRODUCTS: gl.constexpr = 1 if other_pages is None else 2
    BLOCKS: gl.constexpr = LENGTH // COLUMNS
    TURNS: gl.constexpr = BLOCKS // TAKEN
    SLOTS: gl.constexpr = STAGES // TAKEN
    AHEAD: gl.constexpr = min(ahead_of(STAGES, TAKEN), TURNS)
    UNDER_WAY: gl.constexpr = (behind_of(STAGES, TAKEN) - 1) * PRODUCTS * TAKEN
    for block in gl.static_range(AHEAD * TAKEN):
        bring(rows, row_pages, block, block, COLUMNS, STRIDE, WARPS, EXACT)
        if block % TAKEN == TAKEN - 1:
            async_copy.commit_group()
    if not EXACT:
        acc = warpgroup_mma_init(acc)
        other_acc = warpgroup_mma_init(other_acc)
    for turn in range(TURNS):
        if not EXACT:
            acc, other_acc = warpgroup_mma_wait(UNDER_WAY, deps=(acc, other_acc))
        async_copy.wait_group(AHEAD - 1)
        fence_async_shared()
        if EXACT:
            page = turn % PAGES
            part = three(row_pages, turn % STAGES, pages, page, gl.zeros_like(acc))
            if PRODUCTS == 2:
                other_part = three(row_pages, turn % STAGES, other_pages, page, gl.zeros_like(other_acc))
            else:
                other_part = part
        else:
            for k in gl.static_range(TAKEN):
                page = (turn * TAKEN + k) % PAGES
                a = row_pages.index(turn % SLOTS * TAKEN + k)
                acc = warpgroup_mma(a, pages.index(page).permute((1, 0)), acc, is_async=True)
                if PRODUCTS == 2:
                    other_acc = warpgroup_mma(a, other_pages.index(page).permute((1, 0)), other_acc, is_async=True)
            if PRODUCTS == 1:
                other_acc = warpgroup_mma_init(other_acc)
        later = turn + AHEAD
        if later < TURNS:
            for k in gl.static_range(TAKEN):
                to = later % SLOTS * TAKEN + k
                bring(rows, row_pages, later * TAKEN + k, to, COLUMNS, STRIDE, WARPS, EXACT)
                if PAGES < BLOCKS:
                    bring_weights(
                        *(weights, other, pages, other_pages, later * TAKEN + k, to, COLUMNS, STRIDE, WARPS, EXACT)
                    )
        async_copy.commit_group()
        if EXACT:  # tensor cores truncate their sums, so they must be short
            part, other_part = warpgroup_mma_wait(0, deps=(part, other_part))
            acc += part
            if PRODUCTS == 2:
                other_acc += other_part
    if not EXACT:
        acc, other_acc = warpgroup_mma_wait(0, deps=(acc, other_acc))
    return acc, other_acc


@gluon.jit
def publish_operand(mail, slot, unit, STRIDE: gl.constexpr, value, BITS: gl.constexpr, EXACT: gl.constexpr):
    """Publish a program's columns of an operand to its group; EXACT: in two parts, half a row apart."""
    if EXACT:
        high, low = split(value, True)
        publish(mail, slot, unit, STRIDE, high)
        publish(mail, slot, unit + STRIDE // 2, STRIDE, rounded(low))
    elif mail.dtype.element_ty == gl.float16:
        publish(mail, slot, unit, STRIDE, half(value))
    else:
        publish(mail, slot, unit, STRIDE, operand(value, BITS, False))
