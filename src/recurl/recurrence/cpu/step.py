"""One step of a full stack, as in an environment, in a single library call.

Nothing is cached between calls. The library reads the weights in place, so any edit of them takes effect immediately.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from recurl.core.torch_compat import are_modes_active, is_compiling, is_forward_mode, is_functorch_active
from recurl.recurrence.cells import Cell, LayerWeights, States
from recurl.recurrence.cpu.library import check, instruction_sets, step_function

_CELLS = {"lstm": 0, "gru": 1}
_GATES = {"lstm": 4, "gru": 3}
_DTYPES = {torch.float32: 0, torch.float64: 1}
NUMBERS = 25  # fields of recurl_step
NUMBERS_OF_WEIGHTS = 5  # fields of recurl_step_weights
_STEP = struct.Struct(f"{NUMBERS}q")
PLAIN_TYPES = (Tensor, nn.Parameter)
_NO_STATE = (0, 0, 0)
Layers: TypeAlias = Sequence[Sequence[Any]]
"""Weights by layer, with one direction each."""


def can_step() -> bool:
    """Return whether :func:`step` may be used: the library is available and nothing tracks torch's operations.

    Autograd, tracing, function transforms and dispatch modes can't see calls of the library.
    """
    return (
        not torch.is_grad_enabled()
        and not is_compiling()
        and not is_functorch_active()
        and not is_forward_mode()
        and not are_modes_active()
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - documented under this name
        and bool(instruction_sets())
    )


def step(
    cell: Cell,
    layers: Layers,
    x: Tensor,
    states: States | None,
    is_init: Tensor | None,
) -> tuple[Tensor, States] | None:
    """Return the result of :func:`recurl.recurrence.step_stack`, or None if the cell or a tensor is unsupported.

    Tensors must be plain tensors on the CPU, in a dtype of the kernels, with matching shapes.
    """
    kind = _CELLS.get(cell.name)
    if kind is None:
        return None
    (rows, inputs), dtype, depth = x.shape, x.dtype, len(layers)
    first = layers[0][0]
    hidden, outputs = first.hidden_size, first.w_hh.shape[1]
    sizes = (outputs, hidden)[: len(cell.state_names)]
    weights = _weights(cell, layers, dtype, inputs)
    if weights is None or not _fits(x, dtype, (rows, inputs)):
        return None
    numbers = [kind, _DTYPES[dtype], len(instruction_sets()) - 1, torch.get_num_threads()]
    x = _unit_stride(x)
    numbers += rows, depth, inputs, hidden, outputs, x.data_ptr(), x.stride(0)
    if is_init is not None:
        if is_init.dtype is not torch.bool or not is_init.is_cpu or is_init.numel() != rows:
            return None
        is_init = is_init.contiguous()
    numbers += 0 if is_init is None else is_init.data_ptr(), 1
    before: list[Tensor] = []  # kept alive during the call
    for size, state in zip(sizes, states or (None, None), strict=False):
        if state is None:
            numbers += _NO_STATE
            continue
        if not _fits(state, dtype, (rows, depth, size)):
            return None
        before.append(_unit_stride(state))
        numbers += before[-1].data_ptr(), *before[-1].stride()[:2]
    if len(sizes) == 1:
        numbers += _NO_STATE
    features = x.new_empty(rows, outputs)
    after = tuple(x.new_empty(rows, depth, size) for size in sizes)
    for tensor in (features, after[0], after[-1]):
        numbers += tensor.data_ptr(), tensor.stride(0)
    check(step_function()(_STEP.pack(*numbers), weights))
    return features, after


def sizes_of(cell: Cell, layers: Layers, dtype: torch.dtype, inputs: int) -> tuple[bytes, bytes] | None:
    """Return a recurl_step with only the sizes set and its recurl_step_weights; None if unsupported, as in ``step``."""
    weights = _weights(cell, layers, dtype, inputs) if cell.name in _CELLS else None
    if weights is None:
        return None
    first = layers[0][0]
    sizes = len(layers), inputs, first.hidden_size, first.w_hh.shape[1]
    numbers = [_CELLS[cell.name], _DTYPES[dtype], 0, 1, 0, *sizes]
    return _STEP.pack(*numbers, *[0] * (NUMBERS - len(numbers))), weights


def _fits(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return type(tensor) in PLAIN_TYPES and tensor.dtype is dtype and tensor.is_cpu and tensor.shape == shape


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _weights(cell: Cell, layers: Sequence[Sequence[LayerWeights]], dtype: torch.dtype, inputs: int) -> bytes | None:
    """Return the array of recurl_step_weights, or None if the library doesn't support a weight."""
    if dtype not in _DTYPES:
        return None
    rows, outputs = layers[0][0].w_hh.shape
    hidden, projects = layers[0][0].hidden_size, cell.projects
    if rows != _GATES[cell.name] * hidden:
        return None
    pointers: list[int] = []
    for (w,) in layers:
        if outputs != hidden if w.w_hr is None else not projects:
            return None
        shapes = ((rows, inputs), (rows, outputs), (rows,), (rows,), (outputs, hidden))
        for tensor, shape in zip((w.w_ih, w.w_hh, w.b_ih, w.b_hh, w.w_hr), shapes, strict=True):
            if tensor is None:
                pointers.append(0)
            elif _fits(tensor, dtype, shape) and tensor.is_contiguous():
                pointers.append(tensor.data_ptr())
            else:
                return None
        inputs = outputs
    return struct.pack(f"{len(pointers)}q", *pointers)
