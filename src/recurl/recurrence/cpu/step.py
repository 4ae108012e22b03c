"""One step of a few rows, as in an environment: two products by torch, all the rest in one call of the library."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from recurl.recurrence.boundaries import is_functorch_active
from recurl.recurrence.cells import Cell, LayerWeights, States
from recurl.recurrence.cpu.library import Step, instruction_sets, load

_CELLS = {"lstm": 0, "gru": 1}
_DTYPES = {torch.float32: 0, torch.float64: 1}


def can_step(weights: LayerWeights, x: Tensor) -> bool:
    """Whether :func:`step` serves: on the CPU, without gradients, tracing, transforms or projection; and built."""
    return (
        not torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dtype in _DTYPES
        and weights.w_hr is None
        and not torch.compiler.is_compiling()
        and not is_functorch_active()
        and bool(instruction_sets())
    )


def step(cell: Cell, weights: LayerWeights, x: Tensor, states: States) -> States:
    """Return the states ``[B, H]`` after x ``[B, I]``."""
    w = weights
    x_gates, h_gates = _product(w.b_ih, x, w.w_ih), _product(w.b_hh, states[0], w.w_hh)
    before = [state if state.stride(1) == 1 else state.contiguous() for state in states]
    after = tuple(torch.empty(state.shape, dtype=x.dtype) for state in states)
    pointers = [(state.data_ptr(), state.stride(0)) for state in before] + [(None, 0)]
    results = [state.data_ptr() for state in after] + [None]
    rows, hidden = after[0].shape
    arguments = Step(
        _CELLS[cell.name],
        _DTYPES[x.dtype],
        len(instruction_sets()) - 1,
        rows,
        hidden,
        x_gates.data_ptr(),
        h_gates.data_ptr(),
        *pointers[0],
        *pointers[1],
        *results[:2],
    )
    load().recurl_cpu_step(ctypes.byref(arguments))
    return after


def _product(bias: Tensor | None, x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())
