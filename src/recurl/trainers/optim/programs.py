"""Losses with gradients, and advantage estimation, compiled with Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from recurl.execution.capture import ModuleGuard
from recurl.execution.traced import InductorFunction
from recurl.sequences.entries import Entries, Step, leaves

Named: TypeAlias = Mapping[Any, Tensor]


class CompiledBatchFunction:
    """Compiled function from a batch to named tensors, specialized for each batch shape.

    Args:
        function: function without side effects from a batch, passed as ``Entries``, to tensors by name.
        module: module that the function reads. Replacing one of its parameters or buffers triggers recompilation.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> run = CompiledBatchFunction(lambda batch: {"y": net(batch.get("x"))}, net)
        >>> run(Entries({"x": torch.zeros(3, 2)}, torch.Size([3])))["y"].shape
        torch.Size([3, 1])
    """

    def __init__(self, function: Callable[[Entries], Named], module: nn.Module) -> None:
        self._function = function
        self._module = module
        self._guard: ModuleGuard | None = None
        self._compiled: dict[object, tuple[InductorFunction, list[Any]]] = {}

    def __call__(self, batch: Step) -> dict[Any, Tensor]:
        """Run the function compiled for batches like ``batch``; the results have no gradients."""
        entries = dict(leaves(batch))
        shapes = tuple((key, value.shape, value.stride(), value.dtype, value.device) for key, value in entries.items())
        kind = shapes, tuple(part.training for part in self._module.modules())
        if self._guard is None or self._guard.replaced() is not None:
            self._guard, self._compiled = ModuleGuard(self._module), {}
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


def compiled_estimator(
    results: Callable[[Step], Named], module: nn.Module
) -> Callable[[TensorDictBase], TensorDictBase]:
    """Compile an estimator's ``results``; the returned function writes them into a batch, as the estimator does."""

    @torch.no_grad()
    def compute(batch: Entries) -> Named:
        return results(batch)

    compiled = CompiledBatchFunction(compute, module)

    def write(batch: TensorDictBase) -> TensorDictBase:
        for key, result in compiled(batch).items():
            batch.set(key, result.unsqueeze(-1))
        return batch

    return write


class CompiledGradients:
    """Losses of a minibatch and their gradients, compiled together.

    Args:
        losses: function from a minibatch to losses and metrics by name.
        descended: names of the losses whose sum is differentiated; None for all that require gradients.
        module: the networks; parameters that the losses don't depend on get no gradient.
    """

    def __init__(self, losses: Callable[[Step], Named], descended: Sequence[str] | None, module: nn.Module) -> None:
        self._parameters = {f"gradient of {name}": parameter for name, parameter in module.named_parameters()}

        def run(minibatch: Entries) -> Named:
            with torch.enable_grad():
                found = losses(minibatch)
                summed = [name for name in found if found[name].requires_grad] if descended is None else descended
                total = torch.stack([found[name] for name in summed]).sum()
                wanted = [parameter for parameter in self._parameters.values() if parameter.requires_grad]
                names = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
                gradients: Any = torch.autograd.grad(total, wanted, allow_unused=True)
            return {**found, **{n: g for n, g in zip(names, gradients, strict=True) if g is not None}}

        self._run = CompiledBatchFunction(run, module)

    def __call__(self, minibatch: Step) -> dict[str, Tensor]:
        """Return losses and metrics, and set the gradients of the parameters."""
        results = self._run(minibatch)
        for name, parameter in self._parameters.items():
            gradient = results.pop(name, None)
            # optimizers expect the strides of the parameter
            if gradient is not None and gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient
        return results
