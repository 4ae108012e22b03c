"""Backends built from kernels: autograd functions in eager mode and under torch.func, operators while tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from recurl.core.autograd import custom_backward_allowed, needs_double_backward
from recurl.core.torch_compat import is_compiling, is_forward_mode, is_functorch_active
from recurl.recurrence.backend import LayerCall, Support, without_autocast
from recurl.recurrence.cells import States, cell_named, remember
from recurl.recurrence.kernels import Inputs, Kernels, count_outputs, features_and_states, inputs_of
from recurl.recurrence.ops import (
    Arguments,
    Operators,
    dense_gradients,
    map_each,
    map_recurrence,
    options_of,
    refuse_double_backward,
    refuse_forward_mode,
    refuse_tangents,
    run_differentiable,
    run_forward,
    with_options,
)


class KernelBackend:
    """Backend built from a forward and a backward kernel, under their name."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.name = kernels.name
        self.cells = kernels.cells
        self._operators = Operators(kernels)

    def missing(self) -> str | None:
        """Return what must be installed, or None."""
        return self.kernels.missing()

    def unsupported(self, support: Support) -> str | None:
        """Return why the call can't be served, or None."""
        return self.kernels.unsupported(support)

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Run the layer."""
        inputs = inputs_of(call).flat
        wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
        if is_compiling():
            refuse_forward_mode(self.name)
            outputs = self._operators(call, keep=wanted and not call.options.recompute)
        elif is_forward_mode() and (plain := run_differentiable(self.kernels, call)) is not None:
            outputs = plain
        elif is_functorch_active():
            remember(call.cell)
            outputs = _Transformed.apply(self._operators, call.boundaries.starts, *options_of(call), *inputs)
        elif wanted or is_forward_mode():
            outputs: States = _Recurrence.apply(self.kernels, call, *inputs)
        else:
            outputs = run_forward(self.kernels, call, keep=False)[0]
        return features_and_states(call.cell, outputs)


class AutogradBackend(KernelBackend):
    """Kernel backend that uses autograd for cells without hand-written derivatives."""

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Run the layer."""
        by_autograd = call.cell.derivatives is None and not call.options.recompute
        if by_autograd and torch.is_grad_enabled() and custom_backward_allowed():
            outputs = run_differentiable(self.kernels, call)
            assert outputs is not None
            return features_and_states(call.cell, outputs)
        return super().run(call)


class _Recurrence(torch.autograd.Function):
    """Autograd function for eager mode: (kernels, call, *tensors of the call) -> outputs."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, call: LayerCall, *inputs: Tensor | None) -> States:
        outputs, saved = run_forward(kernels, call, keep=not call.options.recompute)
        ctx.kernels, ctx.num_inputs, ctx.num_outputs = kernels, len(inputs), len(outputs)
        # Everything except the tensors, which must be accessed only through save_for_backward.
        ctx.frame = (call.cell, call.boundaries, call.options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *outputs, *saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *some: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors: tuple[Tensor | None, ...] = ctx.saved_tensors
        cell, boundaries, options = ctx.frame
        inputs: Inputs[Any] = Inputs.from_flat(cell, tensors[: ctx.num_inputs])
        needs: Inputs[bool] = Inputs.from_flat(cell, ctx.needs_input_grad[2:])
        kept = cast(States, tensors[ctx.num_inputs :])
        grads = dense_gradients(some, kept[: ctx.num_outputs])
        call = LayerCall(cell, inputs.weights, inputs.x, inputs.states, boundaries, options)
        with without_autocast(call.x.device):
            if needs_double_backward(grads):
                return None, None, *_double_backward(ctx.kernels, call, inputs, grads, needs)
            after, saved = kept[: ctx.num_outputs], kept[ctx.num_outputs :]
            return None, None, *ctx.kernels.backward(call, after, saved, grads, needs).flat

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        refuse_tangents(ctx.kernels.name)


def _double_backward(
    kernels: Kernels, call: LayerCall, inputs: Inputs[Any], grads: States, needs: Inputs[bool]
) -> tuple[Tensor | None, ...]:
    """Return differentiable gradients by running the recurrence again in autograd."""
    with torch.enable_grad():
        outputs = kernels.differentiable(call)
    if outputs is None:
        refuse_double_backward(kernels.name)
    chosen = [tensor is not None and need for tensor, need in zip(inputs.flat, needs.flat, strict=True)]
    wanted = [tensor for tensor, need in zip(inputs.flat, chosen, strict=True) if need]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return tuple(next(found) if need else None for need in chosen)


class _Transformed(torch.autograd.Function):
    """Autograd function for torch.func: (operators, starts, *options, *inputs) -> outputs; gates are not saved.

    Inside ``torch.func.grad``, operators of torch.library have no gradient, whereas an autograd.Function has one.
    """

    @staticmethod
    def forward(operators: Operators, *args: Any) -> States:
        return tuple(operators.forward(*_as_operator(args), False))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: States) -> None:
        ctx.operators, starts, *ctx.options = inputs[:6]
        ctx.save_for_backward(starts, *inputs[6:], *output)
        ctx.num_outputs = len(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        starts, *tensors = ctx.saved_tensors
        found = iter(_TransformedBackward.apply(ctx.operators, starts, *ctx.options, *tensors, *grads))
        inputs = tensors[: len(tensors) - ctx.num_outputs]
        return (*(None for _ in range(6)), *(None if tensor is None else next(found) for tensor in inputs))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        refuse_tangents(ctx.operators.kernels.name)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[States, tuple[int, ...]]:
        operators, *args = inputs

        def run(*call: Any) -> States:
            arguments = Arguments(*call)
            left = iter(arguments.weights)
            weights = [next(left) if given else None for given in arguments.given or ()]
            options = (arguments.cell, arguments.precision, arguments.compute_dtype, arguments.rows)
            return _Transformed.apply(operators, arguments.starts, *options, arguments.x, *weights, *arguments.states)

        mapped = _as_operator(args)
        stacked, dims = map_recurrence(run, info.batch_size, _mapped_dims(in_dims[1:], args), mapped)
        return tuple(stacked), tuple(dims)


class _TransformedBackward(torch.autograd.Function):
    """Gradients of all inputs that are not None: (operators, starts, options, inputs, outputs, their gradients)."""

    @staticmethod
    def forward(operators: Operators, *args: Any) -> States:
        count = count_outputs(cell_named(args[1]))
        arguments, after, grads = _as_operator(args[: -2 * count]), args[-2 * count : -count], args[-count:]
        needs = [True] * len(arguments.tensors)
        return tuple(operators.backward(*arguments, list(after), [], list(grads), needs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: States) -> None:
        ctx.name = inputs[0].kernels.name

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        refuse_double_backward(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        refuse_tangents(ctx.name)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[States, tuple[int, ...]]:
        stacked, dims = map_each(_TransformedBackward.apply, info.batch_size, in_dims, args)
        return tuple(stacked), tuple(dims)


def _as_operator(args: Sequence[Any]) -> Arguments:
    """Convert (starts, cell, precision, compute dtype, rows, *inputs) to operator arguments."""
    starts, cell, precision, compute_dtype, rows, *inputs = args
    return with_options(Inputs.from_flat(cell_named(cell), inputs), starts, cell, precision, compute_dtype, rows)


def _mapped_dims(in_dims: Sequence[Any], args: Sequence[Any]) -> Arguments:
    """Return the mapped dimensions in the layout of :func:`_as_operator`."""
    starts, cell, _, _, _, *dims = in_dims
    _, name, _, _, _, *values = args
    mapped, given = (Inputs.from_flat(cell_named(name), flat) for flat in (dims, values))
    weights = [dim for dim, weight in zip(mapped.weights, given.weights, strict=True) if weight is not None]
    return Arguments(mapped.x, weights, list(mapped.states), starts, None, cell, None, None, None)
