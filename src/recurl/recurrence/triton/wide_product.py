# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# ruff: noqa: ANN001, ANN201, PLR0913
# Kernel bodies are a language of their own: Triton's types are known to its compiler, not to pyright.
"""The product of one step of the wide kernels: both operands stream from the second-level cache."""

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

from recurl.recurrence.triton.registers import collect, operand, publish, rounded, split


@gluon.jit
def bring_weights(
    weights, other, pages, other_pages, block, page, COLUMNS: gl.constexpr, STRIDE: gl.constexpr, WARPS: gl.constexpr
):
    """Start to copy block ``block`` of a program's weights to ``page``, and of the ``other`` ones if there are any."""
    collect(weights + block * COLUMNS, pages.index(page), pages.shape[1], COLUMNS, STRIDE, WARPS)
    if other_pages is not None:
        collect(other + block * COLUMNS, other_pages.index(page), other_pages.shape[1], COLUMNS, STRIDE, WARPS)


@gluon.jit
def bring_first(
    weights,
    other,
    pages,
    other_pages,
    COLUMNS: gl.constexpr,
    STRIDE: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    AGAIN: gl.constexpr,
):
    """Start to copy the blocks that :func:`multiply` begins with; all of them, and once, where the pages hold them."""
    BLOCKS: gl.constexpr = STRIDE // COLUMNS
    if pages.shape[0] == BLOCKS:
        if not AGAIN:
            for block in range(BLOCKS):
                bring_weights(weights, other, pages, other_pages, block, block, COLUMNS, STRIDE, WARPS)
    else:
        for block in gl.static_range(STAGES - 2):
            bring_weights(weights, other, pages, other_pages, block, block, COLUMNS, STRIDE, WARPS)


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
    WARPS: gl.constexpr,
    EXACT: gl.constexpr,
):
    """Return ``acc + rows @ weights.T`` and the same with ``other``, over STRIDE columns, COLUMNS at a time.

    The first blocks of the weights must be on their way (:func:`bring_first`). EXACT: the columns are those of the
    operands rounded to tf32, then those of what the rounding left, and the sum is that of three products of them.
    """
    STAGES: gl.constexpr = row_pages.shape[0]
    PRODUCTS: gl.constexpr = 1 if other_pages is None else 2
    HELD: gl.constexpr = STRIDE // COLUMNS
    HALF: gl.constexpr = HELD // 2
    BLOCKS: gl.constexpr = 3 * HALF if EXACT else HELD
    for block in gl.static_range(STAGES - 2):
        collect(rows + block * COLUMNS, row_pages.index(block), row_pages.shape[1], COLUMNS, STRIDE, WARPS)
        async_copy.commit_group()
    BEGIN: gl.constexpr = HALF if EXACT else 0
    if EXACT:  # tensor cores cut their sums off: no long ones of the large products
        zero = gl.zeros_like(acc)
        other_zero = gl.zeros_like(other_acc)
        for block in range(HALF):
            async_copy.wait_group(STAGES - 3)
            fence_async_shared()
            a = row_pages.index(block % STAGES)
            page = block % pages.shape[0]
            part = warpgroup_mma(a, pages.index(page).permute((1, 0)), zero, use_acc=False, is_async=True)
            if PRODUCTS == 2:
                b = other_pages.index(page).permute((1, 0))
                other_part = warpgroup_mma(a, b, other_zero, use_acc=False, is_async=True)
            else:
                other_part = warpgroup_mma_init(other_zero)
            later = block + STAGES - 2
            page = later % STAGES
            source = gl.where(later < HALF, later, later - HALF)
            collect(rows + source * COLUMNS, row_pages.index(page), row_pages.shape[1], COLUMNS, STRIDE, WARPS)
            if pages.shape[0] < HELD:
                bring_weights(weights, other, pages, other_pages, later % HELD, page, COLUMNS, STRIDE, WARPS)
            async_copy.commit_group()
            part, other_part = warpgroup_mma_wait(0, deps=(part, other_part))
            acc += part
            if PRODUCTS == 2:
                other_acc += other_part
    acc = warpgroup_mma_init(acc)
    other_acc = warpgroup_mma_init(other_acc)
    for block in range(BEGIN, BLOCKS):
        acc, other_acc = warpgroup_mma_wait(PRODUCTS, deps=(acc, other_acc))
        async_copy.wait_group(STAGES - 3)
        fence_async_shared()
        a = row_pages.index(block % STAGES)
        page = block % pages.shape[0]
        acc = warpgroup_mma(a, pages.index(page).permute((1, 0)), acc, is_async=True)
        if PRODUCTS == 2:
            b = other_pages.index(page).permute((1, 0))
            other_acc = warpgroup_mma(a, b, other_acc, is_async=True)
        else:
            other_acc = warpgroup_mma_init(other_acc)
        later = block + STAGES - 2
        if later < BLOCKS:
            page = later % STAGES
            # Rounded with rounded, rounded rows with what rounding left of the weights, then the other way round.
            source = later - BEGIN
            collect(rows + source * COLUMNS, row_pages.index(page), row_pages.shape[1], COLUMNS, STRIDE, WARPS)
            if pages.shape[0] < HELD:
                bring_weights(weights, other, pages, other_pages, later % HELD, page, COLUMNS, STRIDE, WARPS)
        async_copy.commit_group()
    return warpgroup_mma_wait(0, deps=(acc, other_acc))


@gluon.jit
def publish_operand(mail, slot, unit, STRIDE: gl.constexpr, value, BITS: gl.constexpr, EXACT: gl.constexpr):
    """Write a program's columns of an operand for the others of its group; EXACT: in two parts, half a row apart."""
    if EXACT:
        high, low = split(value, True)
        publish(mail, slot, unit, STRIDE, high)
        publish(mail, slot, unit + STRIDE // 2, STRIDE, rounded(low))
    else:
        publish(mail, slot, unit, STRIDE, operand(value, BITS, False))
