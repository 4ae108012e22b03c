"""Operators over a stream of tokens in the form of layers, so that an :class:`Operation` runs their kernels too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from recurl.core.errors import ArgumentTypeError
from recurl.recurrence.backend import DEFAULT_OPTIONS, LayerCall, OperatorSupport, Options
from recurl.recurrence.cells import Cell, Shape, Sizes, States
from recurl.recurrence.kernels import Gradients, Inputs
from recurl.sequences.index import Boundaries
from recurl.sequences.stored import spacing_of


def check_types(boundaries: object, **tensors: object) -> None:
    """Check that boundaries are of their class, and that the others, by name, are tensors.

    Raises:
        ArgumentTypeError: one of them isn't.
    """
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(f"{name} must be a tensor, got {type(value).__name__}: use torch.as_tensor.")
    if not isinstance(boundaries, Boundaries):
        raise ArgumentTypeError(
            f"boundaries must be recurl.recurrence.Boundaries, got {type(boundaries).__name__}: pass "
            "Boundaries.from_is_init(is_init), where is_init is true at the first token of each segment."
        )


class OperatorKernels(Protocol):
    """Kernels of one operator, as pure functions.

    Attributes:
        name: name for ``recurrent_backend``.
    """

    name: str

    def missing(self) -> str | None:
        """Return what must be installed before these kernels can run, or None."""
        return None

    def unsupported(self, support: OperatorSupport) -> str | None:
        """Return why these kernels can't serve a call, or None."""
        return None

    def saved_like(self, inputs: Any) -> States:
        """Return empty tensors of the shapes, dtypes and layouts that the forward pass saves for the backward pass."""
        return ()


class OperatorCell(Cell):
    """An operator as a cell: one of its tensors is the input, those that all tokens share are weights, others states.

    Attributes:
        fields: names of the tensors, in the order of the operator.
        x: the input.
        parameter_names: the weights.
        streams: the states. Results have the shapes of the first.
    """

    features_are_first_state = True
    fields: ClassVar[tuple[str, ...]]
    x: ClassVar[str]
    streams: ClassVar[tuple[str, ...]]

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Raise an error: it is no layer of a module."""
        raise NotImplementedError

    def step(self, x: Tensor, states: States, absent: Tensor | None = None) -> tuple[Tensor, States]:
        """Raise an error: it has no steps. Without weights, one is absent: torch takes no empty list for gradients."""
        raise NotImplementedError

    def arranged(self, values: Sequence[Any]) -> Inputs[Any]:
        """Arrange one value per tensor as those of a cell."""
        of = dict(zip(self.fields, values, strict=True))
        weights = tuple([of.get(name) for name in self.parameter_names])
        return Inputs(of[self.x], weights, tuple([of[name] for name in self.streams]))

    def separated(self, inputs: Inputs[Any] | LayerCall) -> tuple[Any, ...]:
        """Return one value per tensor; the inverse of :meth:`arranged`."""
        names = (self.x, *self.parameter_names, *self.streams)
        of = dict(zip(names, (inputs.x, *inputs.weights, *inputs.states), strict=True))
        return tuple([of[name] for name in self.fields])

    def call(
        self, tensors: Sequence[Tensor | None], boundaries: Boundaries, options: Options = DEFAULT_OPTIONS
    ) -> LayerCall:
        """Return a call of the operator as one of a layer."""
        x, weights, states = self.arranged(tensors)
        return LayerCall(self, weights, x, states, boundaries, options)


def operator_of(call: LayerCall) -> OperatorCell:
    """Return the operator of a call."""
    return cast(OperatorCell, call.cell)


def _gradient(found: Tensor | None, of: Tensor) -> Tensor:
    if found is None:
        return torch.zeros_like(of)
    return found if found.shape == of.shape else found[:: spacing_of(of, found.shape[0])].contiguous()


class OperatorLayer(ABC):
    """Kernels of an operator in the form of :class:`~recurl.recurrence.kernels.Kernels`.

    Args:
        kernels: the kernels.
    """

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    @abstractmethod
    def inputs_of(self, call: LayerCall) -> Any:
        """Return the inputs of a call, as the kernels take them."""

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, States]:
        """Return the results, and what is saved."""
        return self.kernels.forward(self.inputs_of(call), keep)

    def backward(self, call: LayerCall, after: States, saved: States, grads: States, needs: Inputs[bool]) -> Gradients:
        """Return the gradients, zeros of inputs that the kernels don't read.

        Of states of every S-th token, kernels may return the gradients at all tokens.
        """
        cell = operator_of(call)
        wanted = tuple([bool(need) for need in cell.separated(needs)])
        found = self.kernels.backward(self.inputs_of(call), after, saved, grads, wanted)
        each = zip(found, wanted, cell.separated(call), strict=True)
        return cell.arranged([_gradient(grad, one) if need else None for grad, need, one in each])

    def saved_like(self, call: LayerCall) -> States:
        """Return empty tensors like the saved ones."""
        return self.kernels.saved_like(self.inputs_of(call))
