"""Backends built from kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recurl.core.autograd import custom_backward_allowed, pull_back
from recurl.recurrence.backend import LayerCall, Support
from recurl.recurrence.cells import States
from recurl.recurrence.kernels import Gradients, Inputs, Kernels, features_and_states
from recurl.recurrence.operation import Operation, run_operation


class KernelBackend:
    """Backend built from a forward and a backward kernel, under their name.

    Args:
        kernels: the kernels.
        operation: their operation; None to define it.
    """

    def __init__(self, kernels: Kernels, operation: Operation | None = None) -> None:
        self.kernels = kernels
        self.name = kernels.name
        self.cells = kernels.cells
        self._operation = operation or Operation(kernels.name, lambda: kernels)

    def missing(self) -> str | None:
        """Return what must be installed, or None."""
        return self.kernels.missing()

    def unsupported(self, support: Support) -> str | None:
        """Return why the call can't be served, or None."""
        return self.kernels.unsupported(support)

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Run the layer."""
        return features_and_states(call.cell, run_operation(self._operation, call))


class AutogradBackend(KernelBackend):
    """Kernel backend that uses autograd for cells without hand-written derivatives."""

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Run the layer."""
        by_autograd = call.cell.derivatives is None and not call.options.recompute
        if by_autograd and torch.is_grad_enabled() and custom_backward_allowed():
            outputs = self._operation.differentiable(call)
            assert outputs is not None
            return features_and_states(call.cell, outputs)
        return super().run(call)


def backward_by_autograd(kernels: Kernels, call: LayerCall, grads: States, needs: Inputs[bool]) -> Gradients:
    """Return the gradients of a call by rerunning and differentiating ``kernels.differentiable``."""
    inputs = call.inputs
    chosen = [tensor is not None and need for tensor, need in zip(inputs, needs.flat, strict=True)]

    def run(*wanted: Tensor) -> States:
        left = iter(wanted)
        flat = [next(left) if need else tensor for tensor, need in zip(inputs, chosen, strict=True)]
        x, weights, states = Inputs.from_flat(call.cell, flat)
        outputs = kernels.differentiable(replace(call, x=x, weights=weights, states=states))
        assert outputs is not None
        return outputs

    wanted = [tensor for tensor, need in zip(inputs, chosen, strict=True) if need and tensor is not None]
    found = iter(pull_back(run, wanted, tuple(grads)))
    return Inputs.from_flat(call.cell, [next(found) if need else None for need in chosen])
