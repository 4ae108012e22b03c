# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201
# Kernel bodies are Triton code: only its compiler knows their types.
"""Kernels of an Adam step with gradient clipping: the norm, the scalars that depend on it, and the update."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def squares_kernel(gradients, partial, count, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the squares of every PROGRAMS-th block of ``gradients [count]`` into ``partial [PROGRAMS]``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, count, PROGRAMS * BLOCK):
        value = tl.load(gradients + begin + at, mask=begin + at < count, other=0.0)
        total += value * value
    tl.store(partial + tl.program_id(0), tl.sum(total))


@triton.jit
def decide_kernel(
    partial, loss, rate, settings, addresses, norm, scalars,
    parameters, PROGRAMS: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    """Write the norm, the clipping factor, whether the step is taken, and both corrections of each parameter.

    The step counts, at ``addresses [parameters]``, are incremented if the step is taken.
    """
    length = tl.sqrt(tl.sum(tl.load(partial + tl.arange(0, PROGRAMS))))
    both = length + tl.load(loss)
    good = both - both == 0.0
    tl.store(norm, length)
    most, beta1, beta2 = tl.load(settings), tl.load(settings + 1), tl.load(settings + 2)
    tl.store(scalars, tl.minimum(most / (length.to(tl.float64) + 1e-6), 1.0).to(tl.float32))
    tl.store(scalars + 1, good.to(tl.float32))
    number = tl.arange(0, PARAMETERS)
    there = number < parameters
    place = tl.load(addresses + number, mask=there, other=0).to(tl.pointer_type(tl.float32))
    steps = tl.load(place, mask=there, other=1.0) + good.to(tl.float32)
    tl.store(place, steps, mask=there)
    made = steps.to(tl.float64)
    first = 1.0 - tl.exp(made * tl.log(beta1))
    second = tl.sqrt(1.0 - tl.exp(made * tl.log(beta2)))
    tl.store(scalars + 2 + 2 * number, (tl.load(rate).to(tl.float64) / first).to(tl.float32), mask=there)
    tl.store(scalars + 3 + 2 * number, second.to(tl.float32), mask=there)


@triton.jit
def adam_kernel(chunks, gradients, means, squares, scalars, settings, BLOCK: tl.constexpr):
    """Update the parameters of one of ``chunks [..., 4]``: address, position in the buffers, size, parameter index."""
    chunk = chunks + 4 * tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < tl.where(tl.load(scalars + 1) > 0.0, tl.load(chunk + 2), 0)
    place = tl.load(chunk).to(tl.pointer_type(tl.float32)) + at
    flat = tl.load(chunk + 1) + at
    mine = scalars + 2 + 2 * tl.load(chunk + 3)
    beta1, beta2, eps = tl.load(settings + 1), tl.load(settings + 2), tl.load(settings + 3)
    gradient = (tl.load(gradients + flat, mask=inside, other=0.0) * tl.load(scalars)).to(tl.float64)
    mean = beta1 * tl.load(means + flat, mask=inside, other=0.0) + (1.0 - beta1) * gradient
    square = beta2 * tl.load(squares + flat, mask=inside, other=0.0) + (1.0 - beta2) * gradient * gradient
    mean, square = mean.to(tl.float32), square.to(tl.float32)
    tl.store(means + flat, mean, mask=inside)
    tl.store(squares + flat, square, mask=inside)
    spread = tl.sqrt(square) / tl.load(mine + 1) + eps.to(tl.float32)
    tl.store(place, tl.load(place, mask=inside, other=0.0) - tl.load(mine) * (mean / spread), mask=inside)
