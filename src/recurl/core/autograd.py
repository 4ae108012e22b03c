"""Conditions under which hand-written backward passes (reverse mode, first order) may run instead of autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recurl.core.torch_compat import is_compiling, is_forward_mode, is_functorch_active

__all__ = [
    "custom_backward_allowed",
    "double_backward",
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


def double_backward(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return gradients of ``function`` that are themselves differentiable; see :func:`needs_double_backward`.

    Args:
        function: the function that has the hand-written backward, expressed in differentiable torch operations.
        inputs: its arguments, as returned by ``ctx.saved_tensors``.
        grads: gradients of its outputs.

    Returns:
        One gradient for each input, None for those that need none.
    """
    with torch.enable_grad():
        outputs = function(*inputs)
    wanted = [value for value in inputs if value.requires_grad]
    results = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return tuple(next(results) if value.requires_grad else None for value in inputs)
