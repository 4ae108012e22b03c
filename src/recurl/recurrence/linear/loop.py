"""The step-by-step backends ``loop`` and ``reference``."""

from __future__ import annotations

import torch
from torch import Tensor

from recurl.recurrence.linear.kernels import ACCUMULATED, LinearInputs, LinearKernels


class LoopLinear(LinearKernels):
    """Step loop over all segments at once, longest first. Segment lengths are fetched once per batch."""

    name = "loop"

    def forward(self, inputs: LinearInputs) -> Tensor:
        """Return h, ``[N, D]``."""
        a, b, states, boundaries = inputs
        plan, wide = boundaries.host(), ACCUMULATED[b.dtype]
        packed = b.index_select(0, plan.order).to(wide)
        blocks = packed.split(plan.steps)
        factors = [a.to(wide)] * len(blocks) if a.ndim == 1 else a.index_select(0, plan.order).split(plan.steps)
        h = states.index_select(0, plan.starts).to(wide)
        for block, factor in zip(blocks, factors, strict=True):
            h = block.addcmul_(factor.to(wide), h[: block.shape[0]])
        return torch.empty_like(b, memory_format=torch.contiguous_format).index_copy_(0, plan.order, packed.to(b.dtype))


class ReferenceLinear(LinearKernels):
    """Reference kernels: one token after another, with derivatives of any order by autograd."""

    name = "reference"

    def forward(self, inputs: LinearInputs) -> Tensor:
        """Return h, ``[N, D]``; differentiable."""
        a, b, states, boundaries = inputs
        wide = ACCUMULATED[b.dtype]
        after: list[Tensor] = []
        for n, starts in enumerate(boundaries.starts.tolist()):
            before = states[n].to(wide) if starts else after[-1]
            after.append((a if a.ndim == 1 else a[n]).to(wide) * before + b[n].to(wide))
        return torch.stack(after).to(b.dtype)
