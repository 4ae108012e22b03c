"""The backend ``scan``: no loop over time, in operations that ``torch.compile`` fuses.

By doubling (Hillis and Steele, "Data parallel algorithms", 1986): after pass k every token holds what the last 2**k
tokens of its segment do to the state, and the product of their coefficients. Rows bound how long a segment can be, so
that the number of passes is known without waiting for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurl.recurrence.boundaries import Boundaries
from recurl.recurrence.linear.derivatives import Composed, Gradients, gradients
from recurl.recurrence.linear.kernels import ACCUMULATED, Inputs


class ScanLinear(Composed):
    """``log2 T`` passes of elementwise operations for rows of T tokens."""

    name = "scan"

    def forward(self, inputs: Inputs) -> Tensor:
        """Return h, ``[N, D]``; differentiable."""
        a, b, states, boundaries = inputs
        wide = ACCUMULATED[b.dtype]
        first, factor = boundaries.starts.unsqueeze(-1), a.to(wide)
        # Whether the tokens that are summed up begin with their segment's first: nothing before them counts.
        whole = first
        h = b.to(wide) + torch.where(first, factor * states.to(wide), 0)
        shift, length = 1, boundaries.batch_shape[-1]
        while shift < length:
            earlier, cut = h[:-shift], whole[shift:]
            reached = factor if a.ndim == 1 else factor[shift:]
            h = torch.cat([h[:shift], torch.where(cut, h[shift:], reached * earlier + h[shift:])])
            whole = torch.cat([whole[:shift], cut | whole[:-shift]])
            factor = factor * factor if a.ndim == 1 else torch.cat([factor[:shift], reached * factor[:-shift]])
            shift *= 2
        return h.to(b.dtype)


class TracedScan(torch.autograd.Function):
    """The scan with its derivatives, for ``torch.compile`` to see through."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, states: Tensor, starts: Tensor, length: int) -> Tensor:
        """Return h."""
        inputs = Inputs(a, b, states, Boundaries(starts, (length,)))
        h = ScanLinear().forward(inputs)
        ctx.length = length
        ctx.save_for_backward(a, states, starts, h)
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients."""
        a, states, starts, h = ctx.saved_tensors
        inputs = Inputs(a, h, states, Boundaries(starts, (ctx.length,)))
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        found: Gradients = gradients(ScanLinear().forward, inputs, h, grads[0], needs)
        return *found, None, None
