"""Hand-written derivatives of first order, which give way to torch's own where these are asked for more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["differentiate_again", "first_derivatives_do", "is_functorch_active", "is_vmap_active"]

# Inside vmap, grad or functionalize results are wrapped even if inputs are not.
is_functorch_active: Callable[[], bool] = cast(Any, torch._C)._are_functorch_transforms_active  # pyright: ignore[reportPrivateUsage] - torch has no public name for it


def is_vmap_active() -> bool:
    """Whether code runs inside ``torch.vmap``, at any depth of transforms."""
    functorch: Any = cast(Any, torch._C)._functorch  # pyright: ignore[reportPrivateUsage] - torch has no public name for it
    stack = functorch.get_interpreter_stack() if is_functorch_active() else None
    return any(level.key() == functorch.TransformType.Vmap for level in stack or ())


def first_derivatives_do() -> bool:
    """Whether an autograd.Function with derivatives by hand serves: outside ``torch.compile`` and ``torch.func``."""
    return not torch.compiler.is_compiling() and not is_functorch_active()


def differentiate_again(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return gradients of ``function`` that can be differentiated once more, as ``create_graph=True`` asks for.

    Args:
        function: the same as what was derived by hand, in operations that torch can derive.
        inputs: its arguments, as ``save_for_backward`` gives them.
        grads: gradients of its outputs.

    Returns:
        One gradient for each input, None for those that need none.
    """
    with torch.enable_grad():
        outputs = function(*inputs)
    wanted = [value for value in inputs if value.requires_grad]
    results = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return tuple(next(results) if value.requires_grad else None for value in inputs)
