"""Kernel protocol of linear recurrences, and their derivatives as linear recurrences that torch differentiates again.

Let c[n] = conj(a[n]) * (grad[n] + c[n + 1]), restarted at the last token of each segment. The gradient of b[n] is
grad[n] + c[n + 1], the gradient of a[n] is its product with the conjugate of the state before n, and c[n] is the
gradient that reaches the state before n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from recurl.recurrence.operators import OperatorKernels
from recurl.sequences.index import Boundaries

ACCUMULATED = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}
"""Supported dtypes, with the dtype in which the state is carried from token to token.

A float32 product of many factors near one loses a digit every few hundred factors; the wider carried state loses one in
10,000 steps.
"""


class LinearInputs(NamedTuple):
    """Inputs of a recurrence over a flat stream of N tokens with D channels.

    Attributes:
        a: coefficients ``[N, D]``, or ``[D]`` if they are the same at every token.
        b: ``[N, D]``.
        states: stored states ``[N, D]``, read only at the first token of each segment.
        boundaries: the segments.
    """

    a: Tensor
    b: Tensor
    states: Tensor
    boundaries: Boundaries


Run = Callable[[LinearInputs], Tensor]
Needs = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class LinearKernels(OperatorKernels, Protocol):
    """Kernels for ``h[n] = a[n] * h[n - 1] + b[n]``, or ``a[n] * states[n] + b[n]`` where a segment starts.

    Both passes are pure functions without autograd, for N > 0 tokens and D > 0 channels. A subclass that defines only
    the forward pass derives the backward pass from it.
    """

    def forward(self, inputs: LinearInputs) -> Tensor:
        """Return h, ``[N, D]``."""
        ...

    def backward(self, inputs: LinearInputs, h: Tensor, grad: Tensor, needs: Needs) -> Gradients:
        """Return the gradients of a, b and states, None where ``needs`` is false; ``inputs.b`` is not read.

        Args:
            inputs: inputs of :meth:`forward`.
            h: result of :meth:`forward`.
            grad: gradient of ``h``, possibly expanded.
            needs: which gradients to compute. The gradient of the states is zero except at the first token of each
                segment.
        """
        return gradients(self.forward, inputs, h, grad, needs)


def states_before(inputs: LinearInputs, h: Tensor) -> Tensor:
    """Return the state before every token."""
    return torch.where(inputs.boundaries.starts.unsqueeze(-1), inputs.states, h.roll(1, 0))


def gradients(run: Run, inputs: LinearInputs, h: Tensor, grad: Tensor, needs: Needs) -> Gradients:
    """Compute the gradients of a, b and states as in :meth:`LinearKernels.backward` from a forward pass.

    Args:
        run: the forward pass; the gradients are differentiable if it is.
        inputs: its inputs.
        h: its result.
        grad: gradient of the result.
        needs: which gradients to compute.
    """
    boundaries, narrow = inputs.boundaries, h.dtype
    starts, ends = boundaries.starts.unsqueeze(-1), boundaries.ends.unsqueeze(-1)
    wide = ACCUMULATED[narrow]
    a, grad = _conjugate(inputs.a.to(wide)), grad.to(wide)
    reverse = a if a.ndim == 1 else a.flip(0)
    zeros = grad.new_zeros(()).expand_as(grad)
    carried = run(LinearInputs(reverse, (a * grad).flip(0), zeros, boundaries.flipped)).flip(0)
    grad_b = grad + torch.where(ends, 0, carried.roll(-1, 0))
    grad_a = grad_b * _conjugate(states_before(inputs, h).to(wide)) if needs[0] else None
    if grad_a is not None and inputs.a.ndim == 1:
        grad_a = grad_a.sum(0)
    grad_states = torch.where(starts, carried, 0) if needs[2] else None
    found = (grad_a, grad_b if needs[1] else None, grad_states)
    return _narrowed(found, narrow)


def _narrowed(found: Gradients, dtype: torch.dtype) -> Gradients:
    a, b, states = (None if one is None else one.to(dtype) for one in found)
    return a, b, states


def tangent(
    run: Run, inputs: LinearInputs, h: Tensor, tangents: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> Tensor:
    """Return the directional derivative of the result for ``tangents`` of a, b and states; None means zero."""
    wide = ACCUMULATED[h.dtype]
    of_a, of_b, of_states = (None if one is None else one.to(wide) for one in tangents)
    zero = h.new_zeros((), dtype=wide).expand_as(h)
    drive = zero if of_b is None else of_b
    if of_a is not None:
        drive = drive + of_a * states_before(inputs, h).to(wide)
    states = zero if of_states is None else of_states
    return run(LinearInputs(inputs.a.to(wide), drive, states, inputs.boundaries)).to(h.dtype)


def _conjugate(x: Tensor) -> Tensor:
    """Return the conjugate, computed with operations that have vmap rules."""
    return torch.complex(x.real, -x.imag) if x.is_complex() else x
