# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Kernel of one step of a matrix recurrence: each state is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _vector(pointer, offset, width, size):
    return tl.load(pointer + offset + width, mask=width < size, other=0.0).to(tl.float32)


@triton.jit
def step_kernel(
    query,
    query_row,
    query_head,
    key,
    key_row,
    key_head,
    value,
    value_row,
    value_head,
    log_decay,
    rate,
    states,
    states_row,
    states_head,
    states_key,
    states_value,
    is_init,
    output,
    after,
    after_row,
    after_head,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_STATES: tl.constexpr,
    RESETS: tl.constexpr,
):
    """Write the outputs and the states after a token; ``after`` may be ``states``."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    head = ((program // BLOCKS) % heads).to(tl.int64)
    row = (program // BLOCKS // heads).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    v = (program % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (k < K)[:, None] & (v < V)[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_STATES:
        kept = inside
        if RESETS:
            kept = inside & (tl.load(is_init + row) == 0)
        at = states + row * states_row + head * states_head + k[:, None] * states_key + v[None, :] * states_value
        state = tl.load(at, mask=kept, other=0.0).to(tl.float32)
    queries = _vector(query, row * query_row + head * query_head, k, K)
    keys = _vector(key, row * key_row + head * key_head, k, K)
    y = _vector(value, row * value_row + head * value_head, v, V)
    state *= tl.exp(tl.load(log_decay + row * heads + head))
    result = tl.sum(state * queries[:, None], 0)
    if DELTA:
        y -= tl.sum(state * keys[:, None], 0)
    u = tl.load(rate + row * heads + head) * y
    result += tl.sum(queries * keys, 0) * u
    state += keys[:, None] * u[None, :]
    tl.store(output + (row * heads + head) * V + v, result.to(output.dtype.element_ty), mask=v < V)
    to = after + row * after_row + head * after_head + k[:, None] * V + v[None, :]
    tl.store(to, state.to(after.dtype.element_ty), mask=inside)
