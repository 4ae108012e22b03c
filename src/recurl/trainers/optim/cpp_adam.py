"""The step of :class:`~recurl.trainers.optim.gradient_step.GradientStep` on a CPU: one call of recurl's C++ library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from recurl.distributed import average_, world_size
from recurl.execution.explain import NotCompiled
from recurl.native import structures
from recurl.native.library import (
    DTYPES,
    INSTRUCTION_SETS,
    PLAIN_TYPES,
    adam_function,
    can_call,
    check,
    instruction_sets,
)

if TYPE_CHECKING:
    from recurl.trainers.optim.gradient_step import GradientStep

__all__ = ["CpuAdam"]

_ADAM = structures.Adam.packer()


class CpuAdam:
    """Form of ``GradientStep.reference_step`` on a CPU. Gradients are averaged and clipped in place.

    Args:
        definition: the method. The tensors of its optimizer's state must not be replaced or move in memory.
        instruction_set: one of :func:`~recurl.recurrence.cpu.instruction_sets`, or None for the fastest of them.

    Raises:
        NotCompiled: the library isn't available, or doesn't support the parameters.
    """

    def __init__(self, definition: Callable[..., Tensor], instruction_set: str | None = None) -> None:
        owner: GradientStep = definition.__self__  # type: ignore[attr-defined] - a bound method
        self._group = owner.optimizer.param_groups[0]
        self._parameters: list[Tensor] = self._group["params"]
        self._max_norm = owner.max_norm
        device, self._dtype = self._parameters[0].device, self._parameters[0].dtype
        if device.type != "cpu":
            raise NotCompiled(f"the parameters are on {device}")
        if not instruction_sets():
            raise NotCompiled("recurl's C++ library isn't available")
        if self._dtype not in DTYPES:
            raise NotCompiled(f"the parameters are {str(self._dtype).removeprefix('torch.')}, not float32 or float64")
        states = [owner.optimizer.state[parameter] for parameter in self._parameters]
        means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        if not _are_plain((*means, *squares), self._dtype) or not _are_plain(steps, torch.float32):
            raise NotCompiled("the optimizer's state isn't in contiguous CPU tensors of the dtype of the parameters")
        self._shapes = [mean.shape for mean in means]
        columns = zip(means, squares, steps, strict=True)
        self._kept = [(m.data_ptr(), s.data_ptr(), n.data_ptr(), m.numel()) for m, s, n in columns]
        self._state = means, squares, steps  # keeps their memory
        self._isa = INSTRUCTION_SETS.index(instruction_set or instruction_sets()[-1])
        self._parts = structures.Parameter.packer(len(states))

    def __call__(self, grads: Sequence[Tensor], loss: Tensor) -> Tensor:
        """Make a step and return the norm of the gradients before clipping."""
        parameters, group = self._parameters, self._group
        if not can_call():
            raise NotCompiled("autograd, a tracer or a dispatch mode tracks torch's operations")
        if not _are_plain((loss, *grads, *parameters), self._dtype):
            raise NotCompiled("the loss, a gradient or a parameter isn't a contiguous CPU tensor of the same dtype")
        if any(p.shape != s or g.shape != s for p, g, s in zip(parameters, grads, self._shapes, strict=True)):
            raise NotCompiled("a parameter or a gradient doesn't have the shape of its optimizer state")
        if world_size() > 1:
            loss = loss.clone()
            average_([*grads, loss])
        numbers = list[int]()
        for parameter, grad, kept in zip(parameters, grads, self._kept, strict=True):
            numbers += (parameter.data_ptr(), grad.data_ptr(), *kept)
        parts = ctypes.create_string_buffer(self._parts.pack(*numbers))
        norm = torch.empty((), dtype=self._dtype)
        pointers = ctypes.addressof(parts), loss.data_ptr(), norm.data_ptr()
        head = (DTYPES[self._dtype], self._isa, len(self._kept), *pointers)
        options = self._max_norm, float(group["lr"]), *group["betas"], group["eps"]
        check(adam_function()(_ADAM.pack(*head, *options)))
        increment_version([*parameters, *grads])
        return norm


def _are_plain(tensors: Iterable[Tensor], dtype: torch.dtype) -> bool:
    return all(x.dtype is dtype and x.is_cpu and x.is_contiguous() and type(x) in PLAIN_TYPES for x in tensors)
