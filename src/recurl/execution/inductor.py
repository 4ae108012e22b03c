"""Functions of batches compiled by Inductor: losses with their gradients, results of estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from recurl.core.spans import FORWARD_AND_BACKWARD, span
from recurl.execution.capture import ModuleGuard
from recurl.execution.traced import InductorFunction
from recurl.sequences.entries import Entries, Step, leaves

__all__ = ["InductorBatchFunction", "InductorGradients", "InductorResults"]

Named: TypeAlias = Mapping[Any, Tensor]


class InductorBatchFunction:
    """Compiled function from a batch to named tensors, specialized for each batch shape.

    Args:
        function: function without side effects from a batch, passed as ``Entries``, to tensors by name.
        module: module that the function reads. Replacing one of its parameters or buffers triggers recompilation.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> run = InductorBatchFunction(lambda batch: {"y": net(batch.get("x"))}, net)
        >>> run(Entries({"x": torch.zeros(3, 2)}, torch.Size([3])))["y"].shape
        torch.Size([3, 1])
    """

    def __init__(self, function: Callable[[Entries], Named], module: nn.Module) -> None:
        self._function = function
        self._module = module
        self._guard = ModuleGuard(module)
        self._compiled: dict[object, tuple[InductorFunction, list[Any]]] = {}

    def __call__(self, batch: Step) -> dict[Any, Tensor]:
        """Run the function compiled for batches like ``batch``; the results have no gradients."""
        entries = dict(leaves(batch))
        shapes = tuple((key, value.shape, value.stride(), value.dtype, value.device) for key, value in entries.items())
        kind = shapes, tuple(part.training for part in self._module.modules())
        if self._guard.replaced() is not None:
            self._guard.renew()
            self._compiled = {}
        if kind not in self._compiled:
            self._compiled[kind] = self._compile(batch, list(entries), list(entries.values()))
        compiled, names = self._compiled[kind]
        return dict(zip(names, compiled(*entries.values()), strict=True))

    def _compile(
        self, batch: Step, keys: Sequence[Any], values: Sequence[Tensor]
    ) -> tuple[InductorFunction, list[Any]]:
        names: list[Any] = []

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            entries = Entries({}, batch.batch_size, batch.device)
            for key, tensor in zip(keys, tensors, strict=True):
                entries.set(key, tensor)
            found = self._function(entries)
            names[:] = found
            return tuple(value.detach() for value in found.values())

        return InductorFunction(run, values), names


class InductorResults:
    """The results of an estimator, compiled: a form of ``ValueEstimator.results``.

    Args:
        results: the method.
    """

    def __init__(self, results: Callable[[Step], Named]) -> None:
        @torch.no_grad()
        def compute(batch: Entries) -> Named:
            return results(batch)

        self._run = InductorBatchFunction(compute, results.__self__)  # type: ignore[attr-defined] - a bound method

    def __call__(self, batch: Step) -> dict[Any, Tensor]:
        """Return the results for a batch."""
        return self._run(batch)


class InductorGradients:
    """The losses of a batch and their gradients, compiled together: a form of ``LossModule.gradients``.

    Args:
        gradients: the method; parameters that the losses don't depend on get no gradient.
    """

    def __init__(self, gradients: Callable[[Step], Named]) -> None:
        loss: Any = gradients.__self__  # type: ignore[attr-defined] - a bound method
        self._parameters = {f"gradient of {name}": parameter for name, parameter in loss.named_parameters()}

        def run(batch: Entries) -> Named:
            with torch.enable_grad():
                found: Named = loss.tensors(batch)
                total = torch.stack([value for value in found.values() if value.requires_grad]).sum()
                wanted = {name: part for name, part in self._parameters.items() if part.requires_grad}
                grads: Any = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
            return {**found, **{n: g for n, g in zip(wanted, grads, strict=True) if g is not None}}

        self._run = InductorBatchFunction(run, loss)

    def __call__(self, batch: Step) -> dict[str, Tensor]:
        """Return the losses and set the gradients of the parameters."""
        with span(FORWARD_AND_BACKWARD):
            results = self._run(batch)
        for name, parameter in self._parameters.items():
            gradient = results.pop(name, None)
            # optimizers expect the strides of the parameter
            if gradient is not None and gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient
        return results
