"""One step of a full stack, as in an environment, in a single library call.

Nothing is cached between calls. The library reads the weights in place, so any edit of them takes effect immediately.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recurl.native.layers import Layers, is_plain, weights_of
from recurl.native.library import CELLS, DTYPES, check, instruction_sets, step_function
from recurl.native.structures import Step
from recurl.recurrence.cells import Cell, States

__all__ = ["step"]

_STEP = Step.packer()
_NO_STATE = (0, 0, 0)


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
    if cell.name not in CELLS:
        return None
    (rows, inputs), dtype, depth = x.shape, x.dtype, len(layers)
    first = layers[0][0]
    hidden, outputs = first.hidden_size, first.w_hh.shape[1]
    sizes = (outputs, hidden)[: len(cell.state_names)]
    weights = weights_of(cell, layers, dtype, inputs)
    if weights is None or not is_plain(x, dtype, (rows, inputs)):
        return None
    numbers = [CELLS[cell.name], DTYPES[dtype], len(instruction_sets()) - 1, torch.get_num_threads()]
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
        if not is_plain(state, dtype, (rows, depth, size)):
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


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
