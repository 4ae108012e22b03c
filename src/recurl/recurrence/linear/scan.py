"""The backend ``scan``: a parallel scan without a loop over time, in operations that ``torch.compile`` fuses.

The scan uses doubling (Hillis and Steele, "Data parallel algorithms", 1986): after pass k, every token holds the effect
of the last 2**k tokens of its segment on the state, and the product of their coefficients. The row length bounds the
length of a segment, so the number of passes is known without synchronizing with the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurl.recurrence.linear.kernels import ACCUMULATED, Gradients, LinearInputs, LinearKernels, gradients
from recurl.sequences.index import Boundaries


class ScanLinear(LinearKernels):
    """Parallel scan: ``log2 T`` passes of elementwise operations for rows of T tokens."""

    name = "scan"

    def forward(self, inputs: LinearInputs) -> Tensor:
        """Return h, ``[N, D]``; differentiable."""
        a, b, states, boundaries = inputs
        wide = ACCUMULATED[b.dtype]
        first, factor = boundaries.starts.unsqueeze(-1), a.to(wide)
        # True where the accumulated tokens reach back to the first token of the segment.
        complete = first
        h = b.to(wide) + torch.where(first, factor * states.to(wide), 0)
        shift, length = 1, boundaries.batch_shape[-1]
        while shift < length:
            earlier, cut = h[:-shift], complete[shift:]
            reached = factor if a.ndim == 1 else factor[shift:]
            h = torch.cat([h[:shift], torch.where(cut, h[shift:], reached * earlier + h[shift:])])
            complete = torch.cat([complete[:shift], cut | complete[:-shift]])
            factor = factor * factor if a.ndim == 1 else torch.cat([factor[:shift], reached * factor[:-shift]])
            shift *= 2
        return h.to(b.dtype)


class TracedScan(torch.autograd.Function):
    """Autograd function of the scan that ``torch.compile`` can trace."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, states: Tensor, starts: Tensor, length: int) -> Tensor:
        """Return h."""
        inputs = LinearInputs(a, b, states, Boundaries(starts, (length,)))
        h = ScanLinear().forward(inputs)
        ctx.length = length
        ctx.save_for_backward(a, states, starts, h)
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients."""
        a, states, starts, h = ctx.saved_tensors
        inputs = LinearInputs(a, h, states, Boundaries(starts, (ctx.length,)))
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        found: Gradients = gradients(ScanLinear().forward, inputs, h, grads[0], needs)
        return *found, None, None
