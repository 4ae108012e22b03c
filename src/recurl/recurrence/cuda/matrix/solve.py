# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, PLR0913, PLR0915
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments. An if on a constant is a statement because only one of its branches is compiled.
"""What the delta rule needs of a chunk and doesn't depend on the state before it: of all chunks at once.

In the notation of the forward pass::

    M = strict_tril(D * (key @ key.T))
    solution = inverse(I + M * b)
    X = solution @ M  # of the gradients: solution = I - X * b
    y_value = solution @ value
    y_key = (solution * e) @ key
    exit_weight = D[-1] * b

The solution isn't rounded to bfloat16: where keys repeat, errors of y add up over the tokens of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recurl.recurrence.cuda.matrix.parts import (
    at,
    clean,
    decays,
    dot,
    inverse,
    poison,
    rows,
    segments,
    store_rows,
    sums,
    unrounded_dot,
)
from recurl.recurrence.cuda.parts import is_bad


@triton.jit
def solve_kernel(
    key,
    key_token,
    key_head,
    value,
    value_token,
    value_head,
    log_decay,
    rate,
    start_index,
    solvers,
    solved_key,
    solved_value,
    exit_weights,
    exit_decays,
    heads,
    length,
    chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    KEEP: tl.constexpr,
    MAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write y_key and y_value of a chunk of a head; with KEEP X; with MAPS exit_weight and the logarithm of e[-1]."""
    SOLVE: tl.constexpr = "tf32" if PRECISION == "bf16" else PRECISION
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    chunk = (program // heads) % chunks
    row = (program // heads // chunks).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    t = tl.arange(0, CHUNK)
    begin = row * length + chunk * CHUNK
    count = (tl.minimum(begin + CHUNK, (row + 1) * length) - 1 - begin).to(tl.int32)
    inside = t <= count
    segment = segments(start_index, begin, tl.minimum(t, count))
    first = begin * heads + head
    elapsed = decays(log_decay + first, t * heads, inside, segment == t)
    b = tl.load(rate + first + t * heads, mask=inside, other=0.0)
    keys = rows(key + begin * key_token + head * key_head, t, key_token, k, inside, K).to(key.dtype.element_ty)
    below = (segment[:, None] == segment[None, :]) & (t[:, None] > t[None, :])
    between = tl.exp2(elapsed[:, None] - elapsed[None, :])
    products = dot(keys, tl.trans(keys), PRECISION)
    decay = tl.exp2(elapsed)
    mixed = tl.where(below, between * products, 0.0)
    rated = tl.where(below, mixed * b[None, :], 0.0)
    # NaN where a key, rate or decay isn't finite, or products are infinite: of keys, none is larger than a square.
    bad = 0.0 * (tl.sum(tl.where(t[:, None] == t[None, :], products, 0.0), 1) + b + decay) + poison(rated)
    spoilt = is_bad(bad)
    if spoilt:
        sound = (bad == 0)[:, None] & (bad == 0)[None, :]
        mixed = tl.where(sound, mixed, 0.0)
        rated = tl.where(sound, rated, 0.0)
    solution = inverse(rated, CHUNK, SOLVE)
    if KEEP:
        solver = dot(solution, mixed, SOLVE)
        if spoilt:
            solver = tl.where(below, solver + bad[:, None], 0.0)
        store_rows(solvers + first * CHUNK, t, heads * CHUNK, t, inside, solver, CHUNK)
    values = rows(value + begin * value_token + head * value_head, t, value_token, v, inside, V)
    values = values.to(value.dtype.element_ty)
    y_value = unrounded_dot(solution, values, PRECISION)  # not finite if any of the values isn't
    if spoilt | is_bad(y_value):
        given = values.to(tl.float32)
        y_value = unrounded_dot(solution, clean(given), PRECISION)
        y_value += sums(bad + poison(given), segment == t)[:, None]
    store_rows(solved_value + first * V, t, heads * V, v, inside, y_value, V)
    solution *= decay[None, :]
    y_key = unrounded_dot(solution, keys, PRECISION)
    if spoilt:
        solution = tl.where((bad == 0)[None, :], solution, 0.0)
        y_key = unrounded_dot(solution, clean(keys.to(tl.float32)), PRECISION)
        y_key += sums(bad, segment == t)[:, None]
    store_rows(solved_key + first * K, t, heads * K, k, inside, y_key, K)
    if MAPS:
        left = at(elapsed, t, CHUNK - 1)
        leaves = segment == segments(start_index, begin, count)
        weight = tl.where(leaves, tl.exp2(left - elapsed) * b, 0.0)
        tl.store(exit_weights + first + t * heads, weight, mask=inside)
        tl.store(exit_decays + (row * chunks + chunk) * heads + head, left)
