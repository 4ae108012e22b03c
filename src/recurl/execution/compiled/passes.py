"""Compiled passes over sequences: one call of the C++ library for the forward pass, one for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recurl.core.autograd import custom_backward_allowed
from recurl.core.keys import NestedKey
from recurl.core.torch_compat import are_modes_active, has_tensor_hooks
from recurl.execution.compiled.compilation import Compilation
from recurl.execution.explain import NotCompiled
from recurl.native.library import missing
from recurl.native.passes import Pass
from recurl.recurrence.backend import record_run
from recurl.sequences.entries import Entries
from recurl.sequences.index import Boundaries
from recurl.sequences.mode import set_recurrent_mode

__all__ = ["CompiledPass", "PassLayout", "check_passes", "gradients_of"]


def check_passes() -> None:
    """Check that compiled passes can run in this context.

    Raises:
        NotCompiled: they can't, even if networks support them.
    """
    absent = missing()
    if absent is not None:
        raise NotCompiled(absent)
    traced = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - documented under this name
    if not custom_backward_allowed() or are_modes_active() or traced or torch.is_autocast_enabled("cpu"):
        raise NotCompiled("autocast, tracing, forward-mode differentiation or a transform or mode of torch is active")


class CompiledPass:
    """A trunk and its branches, run over whole sequences by the C++ library, with first derivatives.

    Weights are read in place at every call; replaced modules and weights take effect in the next ``CompiledPass``.
    Results equal those of the networks to rounding, about 1e-6 of their norm in float32.

    Args:
        branches: modules of each branch, in order. No branch reads outputs of another, except of the first one, the
            trunk, which all others continue.
        example: entries of a batch, including the states of every token.
        wanted: keys of the outputs.

    Attributes:
        parameters: parameters that receive gradients.
        writes: keys of the outputs, in order.
        layout: the program and the layout of its arguments.

    Raises:
        NotCompiled: a module has no differentiable C++ implementation; the message names it.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> from torch import nn
        >>> from recurl.execution.lowering import Entries
        >>> from recurl.recurrence import Boundaries
        >>> net = TensorDictModule(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), ["observation"], ["features"])
        >>> batch = Entries({"observation": torch.ones(5, 3)}, torch.Size([5]))
        >>> run = CompiledPass([[net]], batch, ["features"])
        >>> run(batch, Boundaries(torch.zeros(5, dtype=torch.bool), [5]))["features"].sum().backward()
        >>> net.module[0].weight.grad.shape
        torch.Size([4, 3])
    """

    def __init__(
        self, branches: Sequence[Sequence[TensorDictModuleBase]], example: Entries, wanted: Sequence[NestedKey]
    ) -> None:
        trunk, *after = branches
        modules = [module for branch in branches for module in branch]
        parameters = {p.data_ptr(): p for module in modules for p in module.parameters()}
        dtype = next((p.dtype for p in parameters.values()), torch.float32)
        with set_recurrent_mode(True):
            compilation = Compilation(example, dtype, wanted, sequences=True)
            for module in trunk:
                compilation.add(module)
            for branch in after:
                with compilation.scope():
                    for module in branch:
                        compilation.add(module)
        self._check(compilation, wanted, parameters)
        builder = compilation.program
        self._trained = [(weight, weight.requires_grad) for weight in builder.weights]
        used = {weight.data_ptr() for weight, trained in self._trained if trained}
        self.parameters = [parameter for pointer, parameter in parameters.items() if pointer in used]
        sizes = [parameter.numel() for parameter in self.parameters]
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        lead = len(example.batch_size)
        reads = compilation.reads
        self.layout = PassLayout(
            Pass(builder.finish(), list(zip(self.parameters, firsts, strict=True))),
            [0] * (2 * (len(reads) + len(compilation.writes))),
            [(2 * read.slot, read.shape[lead:].numel()) for read in reads],
            [(2 * write.slot, write.shape[lead:]) for write in compilation.writes if write.key is not None],
            dtype,
            sizes,
        )
        self._reads = [(cast(NestedKey, read.key), read.shape[lead:], read.dtype) for read in reads]
        self.writes = [write.key for write in compilation.writes if write.key is not None]
        self._memories = sum(bool(getattr(module, "state_keys", None)) for module in modules)

    @staticmethod
    def _check(compilation: Compilation, wanted: Sequence[NestedKey], parameters: dict[int, nn.Parameter]) -> None:
        builder, writes = compilation.program, compilation.writes
        reason = builder.gradient_obstacle
        if reason is not None:
            raise NotCompiled(reason)
        if any(write.fill is not None for write in writes) or {write.key for write in writes} - {None} != set(wanted):
            raise NotCompiled("the networks draw random numbers, or don't write all wanted entries")
        for weight in builder.weights:
            if weight.requires_grad and parameters.get(weight.data_ptr()) is not weight:
                raise NotCompiled("a weight is computed from others, or is not a parameter of the networks")

    def fits(self, entries: Entries) -> bool:
        """Return whether the pass serves ``entries``.

        They must match the example, apart from the number of tokens, and need no gradients. Parameters must have no
        hooks, and may not have been frozen or unfrozen.
        """
        lead = len(entries.batch_size)
        for key, shape, dtype in self._reads:
            value = entries.get(key)
            if type(value) is not Tensor or value.dtype is not dtype or not value.is_cpu or value.requires_grad:
                return False
            if value.shape[:lead] != entries.batch_size or value.shape[lead:] != shape:
                return False
        if any(weight.requires_grad is not trained for weight, trained in self._trained):
            return False
        return entries.batch_size.numel() > 0 and not any(map(has_tensor_hooks, self.parameters))

    def inputs(self, entries: Entries) -> list[Tensor]:
        """Return the input tensors from ``entries``, and record the runs of recurrent modules."""
        for _ in range(self._memories):
            record_run("cpu")
        return [entries.get(key).contiguous() for key, *_ in self._reads]

    def __call__(self, entries: Entries, boundaries: Boundaries) -> dict[NestedKey, Tensor]:
        """Return the outputs of the networks; gradients flow to their parameters.

        Args:
            entries: matching entries ``[T]`` or ``[*B, T]``.
            boundaries: boundaries of their segments.
        """
        inputs = self.inputs(entries)
        batch = entries.batch_size
        found = _Pass.apply(self.layout, batch, boundaries.starts.contiguous(), len(inputs), *inputs, *self.parameters)
        return dict(zip(self.writes, cast("tuple[Tensor, ...]", found), strict=True))


class PassLayout(NamedTuple):
    """A program and the layout of its arguments; a slot is given as its index in ``places``, twice its number."""

    program: Pass
    places: list[int]
    reads: list[tuple[int, int]]
    writes: list[tuple[int, torch.Size]]
    dtype: torch.dtype
    sizes: list[int]

    def filled(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> list[int]:
        """Return the pointers and sizes of inputs and outputs; None for an output that is not written."""
        places = self.places.copy()
        for (slot, columns), value in zip(self.reads, inputs, strict=True):
            places[slot], places[slot + 1] = value.data_ptr(), columns
        for (slot, shape), value in zip(self.writes, outputs, strict=True):
            if value is not None:
                places[slot], places[slot + 1] = value.data_ptr(), shape.numel()
        return places


class _Pass(torch.autograd.Function):
    """Autograd function: (layout, batch size, starts, number of inputs, *inputs, *parameters) -> outputs."""

    @staticmethod
    def forward(
        ctx: Any, layout: PassLayout, batch: torch.Size, starts: Tensor, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs, tokens = tensors[:count], batch.numel()
        outputs = tuple(torch.empty((*batch, *shape), dtype=layout.dtype) for _, shape in layout.writes)
        memory = layout.program.forward(layout.filled(inputs, outputs), tokens, starts)
        ctx.layout, ctx.count, ctx.tokens, ctx.memory = layout, count, tokens, memory
        ctx.save_for_backward(starts, *tensors)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] - once_differentiable loses the parameter names
        layout, count = cast(PassLayout, ctx.layout), ctx.count
        starts, *tensors = ctx.saved_tensors
        inputs, parameters = tensors[:count], tensors[count:]
        given = [None if grad is None else grad.contiguous() for grad in grads]
        no_outputs = [None] * len(given)
        flat_grads = torch.zeros(sum(layout.sizes), dtype=layout.dtype)
        places = layout.filled(inputs, no_outputs)
        output_grads = gradients_of(layout, given)
        layout.program.backward(places, output_grads, ctx.tokens, starts, ctx.memory, flat_grads)
        parts = zip(flat_grads.split(layout.sizes), parameters, strict=True)
        return (None,) * (4 + count) + tuple(part.view(parameter.shape) for part, parameter in parts)


def gradients_of(layout: PassLayout, grads: Sequence[Tensor | None]) -> list[int]:
    """Return the pointers and sizes of gradients of outputs; None for no gradient."""
    places = [0] * len(layout.places)
    for (slot, shape), grad in zip(layout.writes, grads, strict=True):
        if grad is not None:
            places[slot], places[slot + 1] = grad.data_ptr(), shape.numel()
    return places
