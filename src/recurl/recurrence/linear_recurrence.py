"""A linear recurrence over segments, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from recurl.recurrence.boundaries import Boundaries


def linear_recurrence(a: Tensor, b: Tensor, states: Tensor, boundaries: Boundaries, backend: str) -> Tensor:
    """Return h[n] = a[n] * h[n - 1] + b[n], where at a segment's start the stored state is h[n - 1]."""
    flags = boundaries.starts.reshape(-1, *(1,) * (b.ndim - 1))
    a, token = a.expand_as(b), torch.arange(b.shape[0], device=b.device)
    h = torch.where(flags, a * torch.where(flags, states, 0) + b, b)
    age = (token - boundaries.start_index).reshape(flags.shape)
    shift = 1
    while shift < b.shape[0]:
        reach, index = age >= shift, (token - shift).clamp(min=0)
        h = torch.where(reach, h + a * torch.where(reach, h.index_select(0, index), 0), h)
        a = torch.where(reach, a * torch.where(reach, a.index_select(0, index), 0), a)
        shift *= 2
    return h
