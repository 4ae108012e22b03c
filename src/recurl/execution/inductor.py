"""Functions of batches compiled by Inductor: losses with their gradients, results of estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from recurl.core.spans import FORWARD_AND_BACKWARD, span
from recurl.core.torch_compat import has_global_hooks
from recurl.execution.background import is_later
from recurl.execution.capture import SETTINGS, ModuleGuard
from recurl.execution.explain import NotCompiled
from recurl.execution.traced import InductorFunction
from recurl.sequences.entries import Entries, Step, leaves

__all__ = ["InductorBatchFunction", "InductorGradients", "InductorResults"]

Named: TypeAlias = Mapping[Any, Tensor]
_OF_MODULES = {*vars(nn.Module()), "training"}


class InductorBatchFunction:
    """Compiled function from a batch to named tensors, specialized for each batch shape.

    It is compiled again if what it read has changed: submodules, parameters or buffers were replaced, frozen or
    unfrozen, or have other hooks, or an attribute of ``module``, or a public number, string or function of a submodule,
    was assigned. Numbers in tensors may change in place.

    Args:
        function: function without side effects from a batch, passed as ``Entries``, to tensors by name.
        module: module that the function reads.
        name: what the function is, for warnings.

    Raises:
        CompilerFailed: (when called) the compiler failed; see :class:`~recurl.execution.traced.InductorFunction`.
        NotCompiled: (when called) inside :func:`~recurl.execution.background.compiled_later`; programs are only traced.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> run = InductorBatchFunction(lambda batch: {"y": net(batch.get("x"))}, net, "the network")
        >>> run(Entries({"x": torch.zeros(3, 2)}, torch.Size([3])))["y"].shape
        torch.Size([3, 1])
    """

    def __init__(self, function: Callable[[Entries], Named], module: nn.Module, name: str) -> None:
        self._function = function
        self._name = name
        self._module = module
        self._programs: dict[object, _Programs] = {}

    def __call__(self, batch: Step) -> dict[Any, Tensor]:
        """Run the function compiled for batches like ``batch``; the results have no gradients."""
        modes = tuple(part.training for part in self._module.modules())
        if modes not in self._programs:
            self._programs[modes] = _Programs(ModuleGuard(self._module, modes=True, settings=self._settings), {})
        guard, compiled = self._programs[modes]
        if guard.replaced() is not None:
            compiled.clear()
        entries = dict(leaves(batch))
        shapes = tuple((key, value.shape, value.stride(), value.dtype, value.device) for key, value in entries.items())
        kind = batch.batch_size, shapes
        if kind not in compiled:
            compiled[kind] = self._compile(batch, list(entries), list(entries.values()))
            guard.renew()  # afterwards, since tracing may leave something in the module
        run, names = compiled[kind]
        if is_later():
            raise NotCompiled("it is compiled later")
        return dict(zip(names, run(*entries.values()), strict=True))

    def _settings(self) -> dict[str, object]:
        """Return the attributes of the module that its mode doesn't include."""
        own = {name: value for name, value in vars(self._module).items() if name not in _OF_MODULES}
        private = {name: value for name, value in own.items() if name[0] == "_" or not isinstance(value, SETTINGS)}
        return {**private, "global hooks": has_global_hooks()}

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

        return InductorFunction(run, values, name=self._name), names


class _Programs(NamedTuple):
    """Compiled functions and the names of their results, by the batches that they serve, and what they have read."""

    guard: ModuleGuard
    compiled: dict[object, tuple[InductorFunction, list[Any]]]


class InductorResults:
    """The results of an estimator, compiled: a form of ``ValueEstimator.results``.

    Args:
        results: the method.
    """

    def __init__(self, results: Callable[[Step], Named]) -> None:
        @torch.no_grad()
        def compute(batch: Entries) -> Named:
            return results(batch)

        self._run = InductorBatchFunction(
            compute,
            results.__self__,  # type: ignore[attr-defined] - a bound method
            "the results of the estimator",
        )

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
        self._parameters: dict[str, nn.Parameter] = {}  # by the names of their gradients

        def run(batch: Entries) -> Named:
            with torch.enable_grad():
                found: Named = loss.tensors(batch)
                differentiable = [value for value in found.values() if value.requires_grad]
                if not differentiable:
                    raise NotCompiled("no loss depends on a parameter that requires gradients")
                self._parameters = {f"gradient of {name}": part for name, part in loss.named_parameters()}
                wanted = {name: part for name, part in self._parameters.items() if part.requires_grad}
                grads: Any = torch.autograd.grad(
                    torch.stack(differentiable).sum(), list(wanted.values()), allow_unused=True
                )
            return {**found, **{n: g for n, g in zip(wanted, grads, strict=True) if g is not None}}

        self._run = InductorBatchFunction(run, loss, "the loss and its gradients")

    def __call__(self, batch: Step) -> dict[str, Tensor]:
        """Return the losses and set the gradients of the parameters.

        Raises:
            NotCompiled: gradients are disabled, or no loss has any; or the compiler failed.
        """
        if not torch.is_grad_enabled():
            raise NotCompiled("gradients are disabled")
        with span(FORWARD_AND_BACKWARD):
            results = self._run(batch)
        for name, parameter in self._parameters.items():
            gradient = results.pop(name, None)
            # optimizers expect the strides of the parameter
            if gradient is not None and gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient
        return results
