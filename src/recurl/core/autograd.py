"""Conditions under which hand-written backward passes (reverse mode, first order) may run instead of autograd."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recurl.core.torch_compat import is_compiling, is_forward_mode, is_functorch_active

__all__ = [
    "custom_backward_allowed",
    "have_tangents",
    "needs_double_backward",
]


def custom_backward_allowed() -> bool:
    """Return whether a hand-written backward may be used.

    It may not inside ``torch.compile``, ``torch.func`` or forward-mode differentiation.
    """
    return not is_compiling() and not is_functorch_active() and not is_forward_mode()


def have_tangents(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether any of ``tensors`` carries a forward-mode tangent."""
    if not is_forward_mode():
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def needs_double_backward(grads: Iterable[Tensor | None]) -> bool:
    """Return whether a backward pass must itself be differentiable: ``create_graph=True``, or tangents in ``grads``."""
    return torch.is_grad_enabled() or have_tangents(grads)
