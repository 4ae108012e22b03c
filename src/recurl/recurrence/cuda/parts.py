# pyright: basic, reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, SIM108
# Kernel bodies are Triton code: only its compiler knows their types, and a kernel is one function, however long, that
# takes all its arguments. An if on a constant is a statement because only one of its branches is compiled.
"""Parts shared by the plain Triton kernels: nonlinearities, products, a check of numbers, the barrier of a group."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Logistic function; saturates to 0 and 1 without NaN."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Hyperbolic tangent to float32 accuracy: odd polynomial near zero, where the quotient would cancel."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """Convert to an operand of a product: bfloat16, float16 (finite numbers stay finite), or float32 rounded to tf32.

    Tensor cores would truncate the low bits.
    """
    if PRECISION == "bf16":
        y = x.to(tl.bfloat16)
    elif PRECISION == "fp16":
        finite = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
        y = tl.where(tl.abs(x) == float("inf"), x, finite).to(tl.float16)
    elif PRECISION == "tf32":
        rounded = ((x.to(tl.float32).to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        y = tl.where(x == x, rounded, x)  # the carry of a NaN's mantissa could make it finite
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def split(x):
    """Return x rounded to the bits that tensor cores read, and the rest, which keeps a NaN that rounding may lose."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` of :func:`operand` values."""
    if PRECISION == "bf16":
        acc = tl.dot(a, b, acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def is_bad(x):
    """Return whether any number of a tensor isn't finite."""
    total = tl.sum(x * 0.0, 0) if len(x.shape) == 1 else tl.sum(x * 0.0)
    return total != total


@triton.jit
def meet(flag, arrivals, MEMBERS: tl.constexpr):
    """Wait until every program of a group has arrived; what they wrote before is visible afterwards.

    ``flag`` counts arrivals of the group since the launch; ``arrivals`` is the count that completes this barrier.
    """
    tl.debug_barrier()
    if MEMBERS > 1:
        tl.atomic_add(flag, 1, sem="release", scope="gpu")
        while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < arrivals:
            pass
        tl.debug_barrier()
