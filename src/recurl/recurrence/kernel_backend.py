"""Backends made of kernels: an autograd.Function in eager mode, another under torch.func, operators while tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from recurl._torch import is_forward_mode, is_functorch_active
from recurl.autograd import gradients_have_derivatives
from recurl.recurrence.backend import LayerCall, Support, without_autocast
from recurl.recurrence.cells import States
from recurl.recurrence.ops import (
    STARTS,
    STATES,
    Gradients,
    Kernels,
    Operators,
    arguments_of,
    inputs_of,
    map_each,
    map_recurrence,
    refuse_forward_mode,
    refuse_tangents,
    refuse_twice,
    run_differentiable,
    run_forward,
    with_inputs,
)


class KernelBackend:
    """A backend made of a pair of kernels, under their name."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.name = kernels.name
        self._operators = Operators(kernels)

    def missing(self) -> str | None:
        """See :meth:`recurl.recurrence.backend.Backend.missing`."""
        return self.kernels.missing()

    def unsupported(self, support: Support) -> str | None:
        """See :meth:`recurl.recurrence.backend.Backend.unsupported`."""
        return self.kernels.unsupported(support)

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """See :meth:`recurl.recurrence.backend.Backend.run`."""
        inputs = inputs_of(call)
        wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
        if torch.compiler.is_compiling():
            refuse_forward_mode(self.name)
            after = self._operators(call, keep=wanted and not call.options.recompute)
        elif is_forward_mode() and (plain := run_differentiable(self.kernels, call)) is not None:
            after = plain
        elif is_functorch_active():
            after = _Transformed.apply(self._operators, *arguments_of(call)[STARTS:], *inputs)
        elif wanted or is_forward_mode():
            after: States = _Recurrence.apply(self.kernels, call, *inputs)
        else:
            after = run_forward(self.kernels, call, keep=False)[0]
        return after[0], after


class _Recurrence(torch.autograd.Function):
    """The eager path: (kernels, call, *tensors of the call) -> states after every token."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, call: LayerCall, *inputs: Tensor | None) -> States:
        after, saved = run_forward(kernels, call, keep=not call.options.recompute)
        ctx.kernels, ctx.num_inputs, ctx.num_states = kernels, len(inputs), len(after)
        # All but the tensors: the tensors must be reached through save_for_backward only.
        ctx.frame = (call.cell, call.boundaries, call.options)
        ctx.save_for_backward(*inputs, *after, *saved)
        return after

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        tensors: tuple[Tensor | None, ...] = ctx.saved_tensors
        split = ctx.num_inputs
        inputs, kept = tensors[:split], cast(States, tensors[split:])
        cell, boundaries, options = ctx.frame
        template = LayerCall(cell, cast(Any, None), cast(Any, None), (), boundaries, options)
        call, needs = with_inputs(template, inputs), tuple(ctx.needs_input_grad[2:])
        with without_autocast(call.x.device):
            if gradients_have_derivatives(grads):
                return None, None, *_backward_twice(ctx.kernels, call, inputs, grads, needs)
            after, saved = kept[: ctx.num_states], kept[ctx.num_states :]
            return None, None, *ctx.kernels.backward(call, after, saved, grads, needs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        refuse_tangents(ctx.kernels.name)


def _backward_twice(
    kernels: Kernels, call: LayerCall, inputs: Gradients, grads: States, needs: tuple[bool, ...]
) -> Gradients:
    """Gradients that are themselves differentiable: the recurrence again, in autograd."""
    with torch.enable_grad():
        outputs = kernels.differentiable(call)
    if outputs is None:
        refuse_twice(kernels.name)
    wanted = [tensor for tensor, need in zip(inputs, needs, strict=True) if tensor is not None and need]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return tuple(
        next(found) if tensor is not None and need else None for tensor, need in zip(inputs, needs, strict=True)
    )


class _Transformed(torch.autograd.Function):
    """The path of torch.func: (operators, starts, options, inputs) -> states after; keeps no gates.

    Operators of torch.library have no gradient inside ``torch.func.grad``; an autograd.Function has.
    """

    @staticmethod
    def forward(operators: Operators, *args: Any) -> States:
        return tuple(operators.forward(*_as_operator(args), False))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: States) -> None:
        ctx.operators, starts, *ctx.options = inputs[:5]
        ctx.save_for_backward(starts, *inputs[5:], *output)
        ctx.num_states = len(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        starts, *tensors = ctx.saved_tensors
        found = iter(_TransformedBackward.apply(ctx.operators, ctx.num_states, starts, *ctx.options, *tensors, *grads))
        inputs = tensors[: len(tensors) - ctx.num_states]
        return (*(None for _ in range(5)), *(None if tensor is None else next(found) for tensor in inputs))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        refuse_tangents(ctx.operators.kernels.name)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[States, tuple[int, ...]]:
        operators, *args = inputs

        def run(*call: Any) -> States:
            *tensors, states, starts, cell, precision, dtype = call
            return _Transformed.apply(operators, starts, cell, precision, dtype, *tensors, *states)

        stacked, dims = map_recurrence(run, info.batch_size, _as_operator(in_dims[1:]), _as_operator(args))
        return tuple(stacked), tuple(dims)


class _TransformedBackward(torch.autograd.Function):
    """Gradients of all inputs that are there: (operators, number of states, starts, options, inputs, after, grads)."""

    @staticmethod
    def forward(operators: Operators, count: int, *args: Any) -> States:
        call, after, grads = args[: -2 * count], list(args[-2 * count : -count]), list(args[-count:])
        needs = [tensor is not None for tensor in call[4:]]
        return tuple(operators.backward(*_as_operator(call), after, [], grads, needs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: States) -> None:
        ctx.name = inputs[0].kernels.name

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        refuse_twice(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        refuse_tangents(ctx.name)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[States, tuple[int, ...]]:
        stacked, dims = map_each(_TransformedBackward.apply, info.batch_size, in_dims, args)
        return tuple(stacked), tuple(dims)


def _as_operator(args: Sequence[Any]) -> list[Any]:
    """(starts, cell, precision, compute dtype, *inputs) in the order of the operators."""
    starts, cell, precision, compute_dtype, *inputs = args
    return [*inputs[:STATES], inputs[STATES:], starts, cell, precision, compute_dtype]
