"""When hand-written backward passes (reverse mode, first order) may run instead of autograd, and autograd in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recurl.core.torch_compat import are_transforms_excluded, is_compiling, is_forward_mode, is_functorch_active

__all__ = [
    "custom_backward_allowed",
    "have_tangents",
    "needs_double_backward",
    "pull_back",
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


def pull_back(function: Callable[..., Any], inputs: Sequence[Tensor], grads: Any) -> tuple[Tensor, ...]:
    """Return the gradients of ``inputs``, given those of what ``function(*inputs)`` returns: also inside operators.

    Autograd is disabled inside an operator, and function transforms are too if a dispatch mode runs it, such as a
    tracer's or a profiler's. A thread of its own has neither.

    Example:
        >>> pull_back(torch.sin, [torch.zeros(2)], torch.ones(2))
        (tensor([1., 1.]),)
    """

    def run() -> tuple[Tensor, ...]:
        return torch.func.vjp(function, *inputs)[1](grads)

    if not are_transforms_excluded():
        return run()
    stream = torch.cuda.current_stream(inputs[0].device) if inputs[0].is_cuda else None

    def run_on_stream() -> tuple[Tensor, ...]:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            return run()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run_on_stream).result()
