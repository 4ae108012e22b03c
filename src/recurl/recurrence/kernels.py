"""What a backend of kernels brings: a forward and a backward pass as pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from recurl.recurrence.backend import LayerCall, Support
from recurl.recurrence.cells import Cell, States

T = TypeVar("T")


class Inputs(NamedTuple, Generic[T]):
    """What a call can be differentiated by; or one thing for each, such as its gradient or whether that is wanted.

    Attributes:
        x: of the input.
        weights: of each parameter, in the record of the cell (:meth:`Cell.pack`).
        states: of each stored state.
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
        """Return what ``values`` are the ``flat`` of."""
        end = 1 + len(cell.parameter_names)
        return Inputs(values[0], cell.pack(values[1:end]), tuple(values[end:]))


Gradients = Inputs[Tensor | None]


class Kernels(Protocol):
    """One layer in one direction, forward and backward, as pure functions: no autograd, no autocast, inside.

    Outputs are the states after every token, in token order; before them the features, unless these are the first
    state (:attr:`Cell.features_are_first_state`).

    Attributes:
        name: of the backend and, as a prefix, of its operators.
    """

    name: str

    @property
    def cells(self) -> Collection[str] | None:
        """Names of the cells that they serve; None if they serve every cell."""
        ...

    def missing(self) -> str | None:
        """Return what must be installed before these kernels can run at all, or None."""
        ...

    def unsupported(self, support: Support) -> str | None:
        """Return why these kernels can't serve, or None if they can."""
        ...

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
        """Return the outputs and what :meth:`backward` needs.

        With ``keep`` false, because no gradient is wanted or because gates are computed again, that is ``()``.
        """
        ...

    def backward(
        self, call: LayerCall, after: States, saved: tuple[Tensor, ...], grads: States, needs: Inputs[bool]
    ) -> Gradients:
        """Return the gradients of the call's inputs, None where ``needs`` is false.

        Args:
            call: what :meth:`forward` got.
            after: the outputs that it returned.
            saved: what it saved; when ``()``, the gates are computed again, all tokens at once.
            grads: gradients of ``after``, each ``[N, ...]``, possibly expanded.
            needs: which gradients are wanted; None or false where there is no such weight. Those of the states are
                dense ``[N, ...]``, zero except at the first token of each segment.
        """
        ...

    def saved_like(self, call: LayerCall) -> tuple[Tensor, ...]:
        """Return empty tensors of the shapes, dtypes and layouts that :meth:`forward` saves with ``keep``."""
        ...

    def differentiable(self, call: LayerCall) -> States | None:
        """Return the outputs by operations that torch derives, to any order and forwards; or None."""
        ...


def inputs_of(call: LayerCall) -> Inputs[Tensor | None]:
    """Return what a call can be differentiated by."""
    return Inputs(call.x, call.weights, call.states)


def with_inputs(call: LayerCall, inputs: Inputs[Any]) -> LayerCall:
    """Return ``call`` with other tensors."""
    return LayerCall(call.cell, inputs.weights, inputs.x, inputs.states, call.boundaries, call.options)


def count_outputs(cell: Cell) -> int:
    """Return how many outputs kernels have."""
    return len(cell.state_names) + (not cell.features_are_first_state)


def features_and_states(cell: Cell, outputs: States) -> tuple[Tensor, States]:
    """Return what a backend returns, from the outputs of kernels."""
    return outputs[0], outputs if cell.features_are_first_state else outputs[1:]
