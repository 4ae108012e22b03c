"""One step of a whole stack, as in an environment, in one kernel per layer; an operator while tracing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.library import Library

from recurl.core.torch_compat import are_modes_active, is_compiling, is_exporting, is_forward_mode, is_functorch_active
from recurl.recurrence.backend import Options, record_run
from recurl.recurrence.cells import Cell, LayerWeights, States, cell_named
from recurl.recurrence.cuda.backend import missing_package, refused_device
from recurl.recurrence.cuda.step.config import LARGEST, pays

RECORDED = "triton_step"
"""Name passed to :func:`recurl.recurrence.record_backends`, for each layer."""

_STATES = {"lstm": 2, "gru": 1}
_GATES = {"lstm": 4, "gru": 3}
_DTYPES = (torch.float32, torch.bfloat16)
_PLAIN = (Tensor, nn.Parameter)
_SCHEMA = (
    "(Tensor x, Tensor[] weights, Tensor[] states, Tensor? is_init, bool[] given, str cell, str precision) -> Tensor[]"
)


def can_step_on(x: Tensor) -> bool:
    """Return whether :func:`step` may be called: ``x`` is on a supported GPU, and nothing differentiates.

    An exported program doesn't contain the operator, since it should run without recurl.
    """
    return (
        x.is_cuda
        and not is_functorch_active()
        and not is_forward_mode()
        and not is_exporting()
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - documented under this name
        and _runs_kernels(x.device)
    )


@torch.compiler.assume_constant_result
def _runs_kernels(device: torch.device) -> bool:
    return missing_package() is None and refused_device(device) is None


def step(
    cell: Cell,
    layers: Sequence[Sequence[Any]],
    x: Tensor,
    states: States | None,
    is_init: Tensor | None,
    options: Options,
) -> tuple[Tensor, States] | None:
    """Return the result of :func:`recurl.recurrence.step_stack`, or None if the kernel doesn't support the call.

    Supported are plain tensors on one device, in float32 or bfloat16, with matching shapes and without gradients. The
    layers have at most :data:`recurl.recurrence.cuda.step.config.LARGEST` units and no projection. None is also
    returned where the kernel isn't faster; see :func:`recurl.recurrence.cuda.step.config.pays`.
    """
    if cell.name not in _GATES:
        return None
    weights: list[LayerWeights] = [layer for (layer,) in layers]
    if states is None:
        shape = (x.shape[0], len(weights), weights[0].hidden_size)
        states = tuple(x.new_zeros(shape) for _ in range(_STATES[cell.name]))
    if not _serves(cell, weights, x, states) or not _flags_fit(is_init, x):
        return None
    lowest = torch.bfloat16 in (x.dtype, options.compute_dtype)
    precision = "bf16" if lowest else "tf32" if options.precision == "tf32" else "ieee"
    if not pays(x.shape[0], weights[0].hidden_size, precision):
        return None
    if is_compiling() or are_modes_active():
        given = [tensor is not None for layer in weights for tensor in layer[:4]]
        tensors = [tensor for layer in weights for tensor in layer[:4] if tensor is not None]
        features, *after = step_operator(x, tensors, list(states), is_init, given, cell.name, precision)
        return features, tuple(after)
    return _run(weights, x, states, is_init, precision)


def _serves(cell: Cell, weights: Sequence[LayerWeights], x: Tensor, states: States) -> bool:
    first = weights[0]
    hidden, inputs = first.hidden_size, x.shape[1]
    if hidden > LARGEST or x.dtype not in _DTYPES or len(states) != _STATES[cell.name]:
        return False
    gates = _GATES[cell.name] * hidden
    expected: list[tuple[Tensor | None, tuple[int, ...]]] = [(x, (x.shape[0], inputs))]
    expected += [(state, (x.shape[0], len(weights), hidden)) for state in states]
    for w in weights:
        if w.w_hr is not None:
            return False
        expected += [(w.w_ih, (gates, inputs)), (w.w_hh, (gates, hidden)), (w.b_ih, (gates,)), (w.b_hh, (gates,))]
        inputs = hidden
    return all(tensor is None or _fits(tensor, x, shape) for tensor, shape in expected)


def _fits(tensor: Tensor, x: Tensor, shape: tuple[int, ...]) -> bool:
    traced = is_compiling() or bool(are_modes_active())  # tracing uses other tensor classes
    differentiated = torch.is_grad_enabled() and tensor.requires_grad
    fits = tensor.dtype == x.dtype and tensor.device == x.device and tensor.shape == shape
    return (traced or type(tensor) in _PLAIN) and not differentiated and fits


def _flags_fit(is_init: Tensor | None, x: Tensor) -> bool:
    if is_init is None:
        return True
    return is_init.dtype == torch.bool and is_init.device == x.device and is_init.numel() == x.shape[0]


def _run(
    weights: Sequence[LayerWeights], x: Tensor, states: States, is_init: Tensor | None, precision: str
) -> tuple[Tensor, States]:
    for _ in weights:
        record_run(RECORDED)
    # By name: a static import would make users without a GPU load Triton.
    run_step: Any = importlib.import_module("recurl.recurrence.cuda.step.launch").run_step
    return run_step(weights, x, states, is_init, precision)


def _run_operator(
    x: Tensor,
    weights: list[Tensor],
    states: list[Tensor],
    is_init: Tensor | None,
    given: list[bool],
    cell: str,
    precision: str,
) -> list[Tensor]:
    left = iter(weights)
    every = [next(left) if there else None for there in given]
    layers = [cast(LayerWeights, cell_named(cell).pack(every[at : at + 4])) for at in range(0, len(every), 4)]
    features, after = _run(layers, x, tuple(states), is_init, precision)
    return [features, *after]


def _fake(x: Tensor, weights: list[Tensor], states: list[Tensor], *others: Any) -> list[Tensor]:
    hidden = states[0].shape[2]
    return [x.new_empty(x.shape[0], hidden), *(state.new_empty(state.shape) for state in states)]


_library = Library("recurl", "FRAGMENT")  # its deletion would remove the operator
_library.define("triton_step" + _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("triton_step", _run_operator, "CompositeExplicitAutograd")
torch.library.register_fake("recurl::triton_step", _fake, lib=_library)
step_operator: Any = torch.ops.recurl.triton_step.default
