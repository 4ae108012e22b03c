"""Kernel protocol: the forward and backward passes of a backend as pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from recurl.recurrence.backend import LayerCall, Support
from recurl.recurrence.cells import Cell, States

T = TypeVar("T")


class Inputs(NamedTuple, Generic[T]):
    """Differentiable inputs of a call, or one value per input, such as its gradient or whether one is needed.

    Attributes:
        x: value for the input.
        weights: values for the parameters, packed by :meth:`Cell.pack`.
        states: value for each stored state.
    """

    x: T
    weights: Any
    states: tuple[T, ...]

    @property
    def flat(self) -> tuple[T, ...]:
        """``(x, *weights, *states)``."""
        weights: tuple[T, ...] = self.weights
        return (self.x, *weights, *self.states)

    @staticmethod
    def from_flat(cell: Cell, values: Sequence[T]) -> Inputs[T]:
        """Rebuild the inputs from their ``flat`` form."""
        end = 1 + len(cell.parameter_names)
        return Inputs(values[0], cell.pack(values[1:end]), tuple(values[end:]))


Gradients = Inputs[Tensor | None]


class Kernels(Protocol):
    """Forward and backward passes of one layer in one direction, as pure functions without autograd or autocast.

    The outputs are the states after every token, in token order. The features come first, unless they are the first
    state (:attr:`Cell.features_are_first_state`). Subclasses may omit the methods that return None by default.

    Attributes:
        name: name of the backend and prefix of its operators.
        cells: names of the supported cells; None if every cell is supported.
    """

    name: str
    cells: Collection[str] | None = None

    def missing(self) -> str | None:
        """Return what must be installed before these kernels can run, or None."""
        return None

    def unsupported(self, support: Support) -> str | None:
        """Return why these kernels can't serve the call, or None if they can."""
        return None

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
        """Return the outputs and the tensors saved for :meth:`backward`.

        Nothing is saved, ``()``, where ``keep`` is false: no gradient is needed, or the gates are recomputed.
        """
        ...

    def backward(
        self, call: LayerCall, after: States, saved: tuple[Tensor, ...], grads: States, needs: Inputs[bool]
    ) -> Gradients:
        """Return the gradients of the call's inputs, None where ``needs`` is false.

        Args:
            call: the call passed to :meth:`forward`.
            after: the outputs of :meth:`forward`.
            saved: the tensors that it saved; if ``()``, the gates are recomputed for all tokens at once.
            grads: gradients of ``after``, each ``[N, ...]``, possibly expanded.
            needs: which gradients to compute; None or false for a weight that doesn't exist. Gradients of the states
                are dense ``[N, ...]``, zero except at the first token of each segment.
        """
        ...

    def saved_like(self, call: LayerCall) -> tuple[Tensor, ...]:
        """Return empty tensors of the shapes, dtypes and layouts that :meth:`forward` saves with ``keep``."""
        ...

    def differentiable(self, call: LayerCall) -> States | None:
        """Return the outputs through operations that torch differentiates to any order and in forward mode, or None."""
        return None


def count_outputs(cell: Cell) -> int:
    """Return the number of outputs of the kernels for ``cell``."""
    return len(cell.state_names) + (not cell.features_are_first_state)


def features_and_states(cell: Cell, outputs: States) -> tuple[Tensor, States]:
    """Convert the outputs of kernels to the result of :meth:`Backend.run`."""
    return outputs[0], outputs if cell.features_are_first_state else outputs[1:]
