# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments.
"""Parts of the matrix recurrence kernels: products, the inverse of a chunk, sums over segments, chunks of a stream.

Products mix tokens of different segments, whose weights are zero: zero times NaN must not spread. Operands that are
summed over tokens are therefore :func:`clean`, and :func:`poison` of the tokens that were not is added to those weights
that are not zero. Rows of tokens are cleaned in branches: the compiler would repeat an elementwise operation on an
operand in every layout that a product needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(-88.0)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Multiply matrices in bfloat16, or in float32 at a precision of tensor cores, with a float32 sum.

    Products of 64 rows or more are split into parts of 16: for them Triton would emit asynchronous instructions of
    Hopper (wgmma) with operands in registers, which ptxas before CUDA 13.3 lets be overwritten while they are read
    (triton-lang/triton pull request 11781).
    """
    kind: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    precision: tl.constexpr = "tf32" if PRECISION == "bf16" else PRECISION
    a = a.to(kind)
    b = b.to(kind)
    if a.shape[0] >= 64:
        parts: tl.constexpr = a.shape[0] // 16
        left = tl.reshape(a, [parts, 16, a.shape[1]])
        right = tl.broadcast_to(tl.reshape(b, [1, b.shape[0], b.shape[1]]), [parts, b.shape[0], b.shape[1]])
        result = tl.reshape(tl.dot(left, right, input_precision=precision), [a.shape[0], b.shape[1]])
    else:
        result = tl.dot(a, b, input_precision=precision)
    return result


@triton.jit
def unrounded_dot(a, x, PRECISION: tl.constexpr):
    """Multiply by a matrix ``a`` in float32 that isn't rounded to bfloat16, but is the sum of two such matrices."""
    if PRECISION == "bf16":
        high = a.to(tl.bfloat16)
        result = dot(high, x, PRECISION) + dot(a - high.to(tl.float32), x, PRECISION)
    else:
        result = dot(a, x, PRECISION)
    return result


@triton.jit
def clean(x):
    """Replace NaN and infinities by zero."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def poison(x):
    """Return for each row NaN if any of its numbers isn't finite, else zero."""
    return tl.sum(x * 0.0, 1)


@triton.jit
def inverse(a, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of I + a for strictly lower triangular a, by blocks of doubling size.

    Every intermediate result is the inverse of blocks on the diagonal, and as well conditioned: powers of ``a`` would
    grow like binomial coefficients where keys repeat.
    """
    if SIZE > 16:
        HALF: tl.constexpr = SIZE // 2
        left, right = tl.split(tl.permute(tl.reshape(a, [2, HALF, 2, HALF]), [1, 3, 0, 2]))
        first, corner = tl.split(left)
        _, second = tl.split(right)
        first = inverse(first, HALF, PRECISION)
        second = inverse(second, HALF, PRECISION)
        corner = -dot(second, dot(corner, first, PRECISION), PRECISION)
        blocks = tl.join(tl.join(first, corner), tl.join(tl.zeros_like(first), second))
        result = tl.reshape(tl.permute(blocks, [2, 0, 3, 1]), [SIZE, SIZE])
    else:
        apart = tl.arange(0, SIZE)[:, None] ^ tl.arange(0, SIZE)[None, :]  # below 2^n in diagonal blocks of this size
        result = tl.where(apart == 0, 1.0, tl.where(apart == 1, -a, 0.0))
        for level in tl.static_range(1, 4):
            between = dot(tl.where((apart >> level) == 1, a, 0.0), result, PRECISION)
            result -= dot(result, between, PRECISION)
    return result


@triton.jit
def _add(sum0, restarts0, sum1, restarts1):
    return tl.where(restarts1 != 0, sum1, sum0 + sum1), restarts0 | restarts1


@triton.jit
def sums(x, restarts):
    """Return running sums, beginning anew at tokens with a flag."""
    total, _ = tl.associative_scan((x, restarts.to(tl.int32)), 0, _add)
    return total


@triton.jit
def reverse_sums(x, restarts):
    """Return :func:`sums` from the last token to the first."""
    total, _ = tl.associative_scan((x, restarts.to(tl.int32)), 0, _add, reverse=True)
    return total


@triton.jit
def at(x, t, token):
    """Return the number of one token."""
    return tl.sum(tl.where(t == token, x, 0), 0)


@triton.jit
def segments(start_index, begin, t):
    """Return for tokens of a chunk the token of the chunk that their segment starts at; 0 if it started before it.

    Args:
        start_index: first token of each token's segment.
        begin: first token of the chunk.
        t: tokens of the chunk, from 0.
    """
    return tl.maximum((tl.load(start_index + begin + t) - begin).to(tl.int32), 0)


@triton.jit
def decays(log_decay, t, inside, restarts):
    """Return the logarithm, to base 2, of each token's decay since the state before its segment's part of the chunk."""
    x = tl.load(log_decay + t, mask=inside, other=0.0).to(tl.float32)
    return sums(tl.where(x < _LEAST, _LEAST, x) * _LOG2E, restarts)


@triton.jit
def next_stored(segment, start, begin, spacing, SIZE: tl.constexpr):
    """Return the first token after ``start`` at which a segment starts from a stored state, or the chunk's size."""
    stored = ((begin % spacing).to(tl.int32) + segment) % spacing == 0
    return tl.min(tl.where((segment > start) & stored, segment, SIZE), 0)


@triton.jit
def rows(pointer, t, stride, width, inside, size):
    """Load rows of a chunk ``[tokens, size]``, in float32; offsets in a chunk are of 32 bits."""
    mask = inside[:, None] & (width < size)[None, :]
    return tl.load(pointer + (t[:, None] * stride + width[None, :]), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(pointer, t, stride, width, inside, x, size):
    """Store rows of a chunk ``[tokens, size]``."""
    mask = inside[:, None] & (width < size)[None, :]
    tl.store(pointer + (t[:, None] * stride + width[None, :]), x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def matrix(pointer, offset, key_stride, value_stride, k, v, keys, values):
    """Load a matrix, in float32."""
    mask = (k < keys)[:, None] & (v < values)[None, :]
    places = k[:, None] * key_stride + v[None, :] * value_stride
    return tl.load(pointer + offset + places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_matrix(pointer, offset, k, v, x, keys, values):
    """Store a contiguous matrix."""
    mask = (k < keys)[:, None] & (v < values)[None, :]
    tl.store(pointer + offset + (k[:, None] * values + v[None, :]), x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def stored_state(
    states,
    token,
    head,
    states_token,
    states_head,
    states_key,
    states_value,
    spacing,
    k,
    v,
    keys,
    values,
    HAS_STATES: tl.constexpr,
):
    """Load the state stored at a token, zeros if there is none."""
    if HAS_STATES:
        offset = token // spacing * states_token + head * states_head
        state = matrix(states, offset, states_key, states_value, k, v, tl.where(token % spacing == 0, keys, 0), values)
    else:
        state = tl.zeros([k.shape[0], v.shape[0]], tl.float32)
    return state
