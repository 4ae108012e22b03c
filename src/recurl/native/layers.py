"""Recurrent layers of one step: their sizes, and the weights that the library reads in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from recurl.native.library import CELLS, DTYPES, PLAIN_TYPES
from recurl.native.structures import Step, StepWeights

__all__ = ["Layers", "StepCell", "is_plain", "sizes_of", "weights_of"]

_GATES = {"lstm": 4, "gru": 3}
_STEP = Step.packer()
Layers: TypeAlias = Sequence[Sequence[Any]]
"""Weights by layer, with one direction each: a :class:`recurl.recurrence.LayerWeights`."""


class StepCell(Protocol):
    """What a step needs to know of a :class:`recurl.recurrence.Cell`."""

    @property
    def name(self) -> str:
        """Name of the cell."""
        ...

    projects: ClassVar[bool]


def is_plain(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Return whether this is a plain CPU tensor of this dtype and shape."""
    return type(tensor) in PLAIN_TYPES and tensor.dtype is dtype and tensor.is_cpu and tensor.shape == shape


def weights_of(cell: StepCell, layers: Layers, dtype: torch.dtype, inputs: int) -> bytes | None:
    """Return a recurl_step_weights for each layer, or None if the library doesn't support the cell or a weight."""
    if dtype not in DTYPES or cell.name not in CELLS:
        return None
    first = layers[0][0]
    rows, outputs = first.w_hh.shape
    hidden, projects = first.hidden_size, cell.projects
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
            elif is_plain(tensor, dtype, shape) and tensor.is_contiguous():
                pointers.append(tensor.data_ptr())
            else:
                return None
        inputs = outputs
    return StepWeights.packer(len(layers)).pack(*pointers)


def sizes_of(cell: StepCell, layers: Layers, dtype: torch.dtype, inputs: int) -> bytes:
    """Return a recurl_step with only the sizes set, for a cell and layers that :func:`weights_of` supports."""
    first = layers[0][0]
    sizes = len(layers), inputs, first.hidden_size, first.w_hh.shape[1]
    numbers = [CELLS[cell.name], DTYPES[dtype], 0, 1, 0, *sizes]
    return _STEP.pack(*numbers, *[0] * (Step.numbers() - len(numbers)))
