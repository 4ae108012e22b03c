"""Every private name of torch and tensordict that recurl uses: why, and what replaces it if it goes.

A new release of torch breaks this file and its test, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan as _scan
from torch.autograd import forward_ad

__all__ = [
    "Dropout",
    "are_modes_active",
    "edits_of",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "fused_adam_",
    "has_global_hooks",
    "has_hooks",
    "is_forward_mode",
    "is_functorch_active",
    "passes_keywords",
    "returns_other_entries",
    "rnn_kernel",
    "samples",
    "scan",
    "tensors_of",
    "trace",
]

is_functorch_active: Callable[[], bool] = cast(Any, torch)._C._are_functorch_transforms_active
"""Whether ``vmap``, ``grad`` or ``functionalize`` wrap results here, even if inputs are not wrapped.

Without it: ``torch.func.debug_unwrap(result) is not result`` on a result of each operation.
"""

are_modes_active: Callable[[], int] = cast(Any, torch)._C._len_torch_dispatch_stack
"""How many ``TorchDispatchMode`` follow what torch does: they don't see a C++ library of our own.

Without it: step through torch's operations always.
"""

foreach_copy_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = cast(Any, torch)._foreach_copy_
"""Copies tensors into others in one call. Without it: a loop of ``Tensor.copy_``, some microseconds a step slower."""

foreach_add_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = cast(Any, torch)._foreach_add_
foreach_mul_: Callable[[Sequence[Tensor], Tensor], None] = cast(Any, torch)._foreach_mul_
foreach_norm: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = cast(Any, torch)._foreach_norm
fused_adam_: Callable[..., None] = cast(Any, torch)._fused_adam_
"""The kernels of ``torch.optim.Adam(fused=True)`` and ``clip_grad_norm_``.

Called directly they take 0.60 to 0.78 of the CPU time of these two, which is 150 to 200 microseconds of every gradient
step (``benchmarks/bench_gradient_step.py``). Without the names: ``torch.optim.adam.adam(fused=True)``,
``get_total_norm`` and ``clip_grads_with_norm_``, with the same bits in 0.86.
"""

scan: Callable[..., Any] = _scan
"""A loop over a dimension that ``torch.compile`` keeps as one. Without it: ``torch.scan``, once torch has it."""

Dropout: Any = cast(Any, nn.modules.dropout)._DropoutNd
"""The base of all dropout modules. Without it: the tuple of them."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_has_global_hooks: Callable[[], bool] = cast(Any, nn.modules.module)._has_any_global_hook


def is_forward_mode() -> bool:
    """Return whether tensors may carry tangents, inside ``torch.func.jvp`` or a level of ``torch.autograd.forward_ad``.

    ``torch.no_grad`` doesn't stop them. Without the name: ask ``unpack_dual`` of every tensor.
    """
    return cast(Any, forward_ad)._current_level >= 0


def has_hooks(module: nn.Module) -> bool:
    """Return whether ``module`` itself has hooks. Without the names: run every module by its ``__call__``."""
    values = vars(module)
    return any(values.get(name) for name in _HOOKS)


def has_global_hooks() -> bool:
    """Return whether hooks are registered for all modules. Without the name: as :func:`has_hooks`."""
    return _has_global_hooks()


def tensors_of(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return the dicts that hold the parameters and buffers of ``module`` alone, live.

    To put other tensors in their place and these back. Without the names: ``torch.func.functional_call``.
    """
    return cast(Any, module)._parameters, cast(Any, module)._buffers


def edits_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was edited in place, as torch counts; inference tensors raise RuntimeError.

    Without the name: compare contents.
    """
    return tensor._version


def rnn_kernel(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """Return torch.nn's fused kernels of a cell, ``"lstm"`` or ``"gru"``, on packed sequences.

    Without the name: ``torch.nn.LSTM`` with its weights put in place by ``torch.func.functional_call``.
    """
    return getattr(cast(Any, torch)._VF, name)


def trace() -> Any:
    """Return the context of the compilation under way: settings, and attributes of our own.

    Without the name: mark lengths as unbacked in the caller's code, ``torch._check``.
    """
    return cast(Any, torch)._guards.TracingContext.get()


def samples(sequence: nn.Module) -> bool:
    """Return whether a ``ProbabilisticTensorDictSequential`` ends in a draw. Without the name: try it."""
    return cast(Any, sequence)._requires_sample


def passes_keywords(module: nn.Module) -> bool:
    """Return whether a ``TensorDictModule`` passes entries by keyword, or more. Without the names: don't lower any."""
    inner = cast(Any, module)
    return bool(inner.method_kwargs or inner._get_kwargs or inner._kwargs is not None)


def returns_other_entries(module: nn.Module) -> bool:
    """Return whether a TensorDict module keeps only some of what it computes (``select_out_keys``).

    Without the name: compare ``out_keys`` with ``out_keys_source`` alone, which misses what selects all of them.
    """
    inner = cast(Any, module)
    return getattr(module, "_select_before_return", False) or inner.out_keys != inner.out_keys_source
