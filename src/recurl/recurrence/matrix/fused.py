"""Backends of matrix recurrences with kernels of their own, as operators that torch can compile and capture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from recurl.core.errors import UnsupportedError
from recurl.recurrence.backend import LayerCall
from recurl.recurrence.built_in import MATRIX_KERNELS, MATRIX_OPERATIONS
from recurl.recurrence.cells import Cell, Shape, Sizes, States, remember
from recurl.recurrence.kernels import Gradients, Inputs
from recurl.recurrence.matrix.chunked import ChunkedMatrix
from recurl.recurrence.matrix.kernels import COMPUTED, MatrixInputs, MatrixKernels
from recurl.recurrence.operation import run_operation

Saved = tuple[Tensor, ...]


class FusedKernels(Protocol):
    """Forward and backward passes of matrix recurrences, without autograd."""

    def missing(self) -> str | None:
        """Return what must be installed before these kernels can run, or None."""
        ...

    def unsupported(self, device: torch.device, dtype: torch.dtype, keys: int = 1, values: int = 1) -> str | None:
        """Return why these kernels can't serve a call with keys and values of these sizes, or None."""
        ...

    def forward(self, inputs: MatrixInputs, after: bool, keep: bool) -> tuple[Tensor, Tensor | None, Saved]:
        """Return the results, the states at the ends of segments if ``after``, and what is saved if ``keep``."""
        ...

    def backward(
        self,
        inputs: MatrixInputs,
        saved: Saved,
        grad_output: Tensor,
        grad_after: Tensor | None,
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value, log_decay, rate and states, None where not needed."""
        ...

    def saved_like(self, inputs: MatrixInputs) -> Saved:
        """Return empty tensors like those that :meth:`forward` saves."""
        ...


class FusedMatrix(MatrixKernels):
    """Backend of kernels by name.

    Args:
        name: their name.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def kernels(self) -> FusedKernels:
        """The kernels, imported on first use."""
        return MATRIX_KERNELS[self.name]()

    def missing(self) -> str | None:
        """Return what must be installed before these kernels can run, or None."""
        return self.kernels.missing()

    def unsupported(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why these kernels can't serve tensors of ``dtype`` on ``device``, or None."""
        return self.kernels.unsupported(device, dtype)

    def run(self, inputs: MatrixInputs, after: bool) -> tuple[Tensor, Tensor | None]:
        """Return the results, and the states at the ends of segments."""
        keys, values = inputs.key.shape[-1], inputs.value.shape[-1]
        reason = self.kernels.unsupported(inputs.value.device, inputs.value.dtype, keys, values)
        if reason is not None:
            raise UnsupportedError(f"The backend {self.name!r} can't run this matrix recurrence: {reason}.")
        result, *states = run_operation(MATRIX_OPERATIONS[self.name], _layer_call(inputs, after))
        return result, states[0] if after else None


@dataclass(frozen=True)
class _Matrix(Cell, name="matrix recurrence"):
    """The recurrence as a cell: query is its input, and the other inputs are states, results first.

    Attributes:
        delta: as in :class:`MatrixInputs`.
        stored: whether there are stored states; else zeros take their place.
        after: whether the states after segments are outputs.
    """

    delta: bool = False
    stored: bool = False
    after: bool = False
    features_are_first_state: ClassVar[bool] = True

    @property
    def state_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride] - by options
        return ("result", "after") if self.after else ("result",)

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        raise NotImplementedError

    def step(self, x: Tensor, states: States, absent: Tensor | None = None) -> tuple[Tensor, States]:
        raise NotImplementedError


_CELLS = {flags: _Matrix(*flags) for flags in product((False, True), repeat=3)}
for _cell in _CELLS.values():
    remember(_cell)  # for programs that another process traced


def _layer_call(inputs: MatrixInputs, after: bool) -> LayerCall:
    query, key, value, log_decay, rate, stored, boundaries, delta = inputs
    cell = _CELLS[delta, stored is not None, after]
    if stored is None:
        shape = (*key.shape, value.shape[-1])
        stored = value.new_zeros((1,) * len(shape), dtype=COMPUTED[value.dtype]).expand(shape)
    return LayerCall(cell, (None,), query, (value, stored, key, log_decay, rate), boundaries)


def _inputs_of(call: LayerCall) -> MatrixInputs:
    value, stored, key, log_decay, rate = call.states
    cell = _cell_of(call)
    states = stored if cell.stored else None
    return MatrixInputs(call.x, key, value, log_decay, rate, states, call.boundaries, cell.delta)


def _cell_of(call: LayerCall) -> _Matrix:
    assert isinstance(call.cell, _Matrix)
    return call.cell


class LayerKernels:
    """Kernels of matrix recurrences in the form of an :class:`~recurl.recurrence.operation.Operation`.

    Args:
        name: their name.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def _kernels(self) -> FusedKernels:
        return MATRIX_KERNELS[self.name]()

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, Saved]:
        """Return the outputs and what is saved."""
        result, after, saved = self._kernels.forward(_inputs_of(call), _cell_of(call).after, keep)
        return (result,) if after is None else (result, after), saved

    def backward(self, call: LayerCall, after: States, saved: Saved, grads: States, needs: Inputs[bool]) -> Gradients:
        """Return the gradients; what was not saved is computed again."""
        inputs, (to_value, to_stored, to_key, to_decay, to_rate) = _inputs_of(call), needs.states
        if not saved:
            _, _, saved = self._kernels.forward(inputs, False, True)
        wanted = (needs.x, to_key, to_value, to_decay, to_rate, to_stored and inputs.states is not None)
        grad_after = grads[1] if _cell_of(call).after else None
        query, key, value, decay, rate, states = self._kernels.backward(inputs, saved, grads[0], grad_after, wanted)
        if to_stored and states is None:
            states = torch.zeros_like(call.states[1])
        return Inputs(query, (None,), (value, states, key, decay, rate))

    def saved_like(self, call: LayerCall) -> Saved:
        """Return empty tensors like those that :meth:`forward` saves."""
        return self._kernels.saved_like(_inputs_of(call))

    def differentiable(self, call: LayerCall) -> States:
        """Return the outputs through operations that torch differentiates to any order."""
        result, after = ChunkedMatrix().run(_inputs_of(call), _cell_of(call).after)
        return (result,) if after is None else (result, after)
