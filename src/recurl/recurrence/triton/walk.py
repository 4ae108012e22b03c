# pyright: basic, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201
# Kernel bodies are a language of their own: Triton's types are known to its compiler, not to pyright.
"""How segments are shared out, and pointwise kernels over all tokens.

A *slot* is one row of a tile. Slot s of R walks, token by token, the segments that start in [s q, (s + 1) q), with
q = ceil(N / R): a contiguous piece of the stream. Nothing is sorted, nothing waits for the host, the grid is fixed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.triton.parts import sigmoid, tanh


@triton.jit
def bounds_kernel(starts, bounds, tokens, share, BLOCK: tl.constexpr):
    """Write where slot ``program_id(0)`` begins: the first segment start at or after ``slot * share``, else N."""
    slot = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    base = slot * share
    found = tokens
    while base < found:
        token = base + lane
        flag = tl.load(starts + token, mask=token < tokens, other=0)
        found = tl.minimum(found, tl.min(tl.where(flag != 0, token, tokens)))
        base += BLOCK
    tl.store(bounds + slot, found)


@triton.jit
def previous_kernel(
    stored, stored_row, stored_column, after, starts, before, total, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the state before every token: the stored one at segment starts, else that after the previous token."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    token = place // HIDDEN
    unit = place % HIDDEN
    first = tl.load(starts + token, mask=inside, other=1) != 0
    kept = tl.load(stored + token * stored_row + unit * stored_column, mask=inside & first, other=0.0)
    earlier = tl.load(after + place - HIDDEN, mask=inside & (first == 0), other=0.0)
    value = tl.where(first, kept.to(tl.float32), earlier.to(tl.float32))
    tl.store(before + place, value.to(before.dtype.element_ty), mask=inside)


@triton.jit
def gates_kernel(
    input_gates, hidden_gates, b_hn, gates, total, HIDDEN: tl.constexpr, LSTM: tl.constexpr, BLOCK: tl.constexpr
):
    """Finish the gates of all tokens at once from the two products, as the forward kernel saves them."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    token = place // HIDDEN
    unit = place % HIDDEN
    GATES: tl.constexpr = 4 if LSTM else 3
    source = token * (GATES * HIDDEN) + unit
    target = token * (4 * HIDDEN) + unit
    x0 = tl.load(input_gates + source, mask=inside, other=0.0).to(tl.float32)
    x1 = tl.load(input_gates + source + HIDDEN, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(input_gates + source + 2 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
    h0 = tl.load(hidden_gates + source, mask=inside, other=0.0).to(tl.float32)
    h1 = tl.load(hidden_gates + source + HIDDEN, mask=inside, other=0.0).to(tl.float32)
    h2 = tl.load(hidden_gates + source + 2 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
    g0 = sigmoid(x0 + h0)
    g1 = sigmoid(x1 + h1)
    if LSTM:
        x3 = tl.load(input_gates + source + 3 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
        h3 = tl.load(hidden_gates + source + 3 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
        g2 = tanh(x2 + h2)
        g3 = sigmoid(x3 + h3)
    else:
        g3 = h2 + tl.load(b_hn + unit, mask=inside, other=0.0).to(tl.float32)
        g2 = tanh(x2 + g0 * g3)
        if gates.dtype.element_ty == tl.float16:  # the one kept value that has no bound
            g3 = tl.minimum(tl.maximum(g3, -65504.0), 65504.0)
    tl.store(gates + target, g0.to(gates.dtype.element_ty), mask=inside)
    tl.store(gates + target + HIDDEN, g1.to(gates.dtype.element_ty), mask=inside)
    tl.store(gates + target + 2 * HIDDEN, g2.to(gates.dtype.element_ty), mask=inside)
    tl.store(gates + target + 3 * HIDDEN, g3.to(gates.dtype.element_ty), mask=inside)
