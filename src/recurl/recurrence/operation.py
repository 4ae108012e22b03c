"""Differentiable calls of kernels.

:func:`run_operation` runs a call

* in eager mode as an autograd.Function;
* under ``torch.func`` as an autograd.Function of the form that function transforms need, which is slower. Operators
  can't replace it: inside ``torch.func.grad`` they raise an error, and in forward mode they drop the tangents;
* while ``torch.compile`` or ``torch.export`` is tracing, under dispatch modes, and for tensor subclasses such as fake
  tensors, as operators of ``torch.library``:

  * fake: output shapes follow from input shapes alone, never from the boundaries; outputs are contiguous, and saved
    tensors laid out like those of ``saved_like``.
  * autograd: first derivatives, or any order if the operation is closed; else differentiating twice raises an error.
  * autocast: a recurrence computes in the dtype of its weights, and the other inputs are cast to it.
  * vmap: mapped inputs, states and boundaries become one longer stream; mapped weights (an ensemble) become a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.library import Library

from recurl.core.autograd import have_tangents, needs_double_backward
from recurl.core.errors import UnsupportedError
from recurl.core.torch_compat import are_modes_active, is_compiling, is_forward_mode, is_functorch_active
from recurl.native.library import PLAIN_TYPES
from recurl.recurrence.backend import LayerCall, Options, record_run, without_autocast
from recurl.recurrence.cells import States, cell_named, remember
from recurl.recurrence.kernels import Gradients, Inputs, count_outputs
from recurl.sequences.index import Boundaries

Run = Callable[[LayerCall], States]


def refuse_tangents(name: str) -> NoReturn:
    """Raise an error, since kernels have no forward-mode derivatives."""
    raise UnsupportedError(
        f"The recurrent backend {name!r} has no forward-mode derivatives here (torch.func.jvp, jacfwd, "
        "torch.autograd.forward_ad): use recurrent_backend='loop', outside torch.compile and torch.export."
    )


def refuse_forward_mode(name: str) -> None:
    """Raise an error in forward mode, since operators would silently drop the tangents."""
    if is_forward_mode():
        refuse_tangents(name)


def refuse_double_backward(name: str) -> NoReturn:
    """Raise an error, since kernels have first derivatives only."""
    raise UnsupportedError(
        f"The recurrent backend {name!r} has no second derivatives here, so its gradients can't be differentiated "
        "again. For double backward use recurrent_backend='loop', outside torch.compile and torch.func."
    )


class Arguments(NamedTuple):
    """Call as the leading arguments of an operator, or one value per argument, such as the mapped dimension.

    Attributes:
        x: the input.
        weights: the weights that are not None.
        states: the stored states.
        starts: start flags of the boundaries.
        given: for each parameter of the cell, whether it is not None.
        cell: name of the cell.
        precision: see :class:`Options`.
        compute_dtype: see :class:`Options`.
        rows: number of rows in the batch, which have equal lengths and at least one segment each; 1 if unknown.
    """

    x: Any
    weights: list[Any]
    states: list[Any]
    starts: Any
    given: list[bool]
    cell: str
    precision: str
    compute_dtype: torch.dtype
    rows: int

    @property
    def tensors(self) -> list[Any]:
        """Arguments that may need gradients: x, weights, states."""
        return [self.x, *self.weights, *self.states]

    def with_tensors(self, values: Sequence[Any]) -> Arguments:
        """Return these arguments with others in place of ``tensors``."""
        end = 1 + len(self.weights)
        return self._replace(x=values[0], weights=list(values[1:end]), states=list(values[end:]))

    def spread(self, values: Sequence[Any]) -> Inputs[Any]:
        """Arrange one value per tensor of ``tensors`` as inputs of the cell, with None for absent weights."""
        x, weights, states, *_ = self.with_tensors(values)
        left = iter(weights)
        return Inputs(x, cell_named(self.cell).pack([next(left) if one else None for one in self.given]), tuple(states))

    def gathered(self, inputs: Inputs[Any]) -> list[Any]:
        """Return one value per tensor of ``tensors``; the inverse of :meth:`spread`."""
        weights = [value for value, given in zip(inputs.weights, self.given, strict=True) if given]
        return [inputs.x, *weights, *inputs.states]


_CALL = len(Arguments._fields)
_SCHEMA = (
    "Tensor x, Tensor[] weights, Tensor[] states, Tensor starts, "
    "bool[] given, str cell, str precision, ScalarType compute_dtype, int rows"
)
_library = Library("recurl", "FRAGMENT")  # kept alive: deleting it would unregister the operators


def arguments_of(call: LayerCall) -> Arguments:
    """Convert a call to operator arguments."""
    if not is_compiling():
        remember(call.cell)
    given = [weight is not None for weight in call.weights]
    weights = [weight for weight in call.weights if weight is not None]
    options = call.cell.name, call.options.precision, call.options.compute_dtype, call.known_rows
    return Arguments(call.x, weights, list(call.states), call.boundaries.starts, given, *options)


def call_of(arguments: Arguments) -> LayerCall:
    """Convert operator arguments back to a call."""
    inputs = arguments.spread(arguments.tensors)
    options = Options(False, arguments.precision, arguments.compute_dtype)
    boundaries = Boundaries(arguments.starts, (arguments.rows, inputs.x.shape[0] // arguments.rows))
    return LayerCall(cell_named(arguments.cell), inputs.weights, inputs.x, inputs.states, boundaries, options)


class Operation:
    """Calls of one pair of kernels, and their operators ``recurl::<prefix>_forward`` and ``recurl::<prefix>_backward``.

    Args:
        name: name of the backend.
        load: returns the kernels; called on first use.
        prefix: prefix of the operators; None for the name.
        closed: whether the kernels define their derivatives as further calls, so that there are any number of them.
    """

    def __init__(self, name: str, load: Callable[[], Any], prefix: str | None = None, *, closed: bool = False) -> None:
        self.name, self._load, self.closed = name, load, closed
        prefix = prefix or name
        backward = f"({_SCHEMA}, Tensor[] after, Tensor[] saved, Tensor?[] grads, bool[] needs) -> Tensor[]"
        self.forward = self._define(f"{prefix}_forward", f"({_SCHEMA}, bool keep) -> Tensor[]", "forward")
        self.backward = self._define(f"{prefix}_backward", backward, "backward")
        torch.library.register_autograd(
            self.forward, self._gradient, setup_context=self._save_for_gradient, lib=_library
        )
        torch.library.register_autograd(self.backward, lambda ctx, *grads: refuse_double_backward(name), lib=_library)

    @cached_property
    def kernels(self) -> Any:
        """The kernels."""
        return self._load()

    def run(self, call: LayerCall, keep: bool) -> tuple[States, States]:
        """Run the forward kernel outside autocast and record the run."""
        record_run(self.name)
        with without_autocast(call.x.device):
            return self.kernels.forward(call, keep)

    def differentiable(self, call: LayerCall) -> States | None:
        """Run the kernels' differentiable form outside autocast and record the run; None if there is no such form."""
        if self.closed:
            return None
        with without_autocast(call.x.device):
            after = self.kernels.differentiable(call)
        if after is not None:
            record_run(self.name)
        return after

    def gradients_again(
        self, call: LayerCall, after: States, grads: States, needs: Inputs[bool], run: Run
    ) -> Gradients:
        """Return gradients that are themselves differentiable; ``run`` runs other calls."""
        if self.closed:
            return self.kernels.gradients(run, call, after, grads, needs)
        with torch.enable_grad():
            outputs = self.kernels.differentiable(call)
        if outputs is None:
            refuse_double_backward(self.name)
        inputs = call.inputs
        chosen = [tensor is not None and need for tensor, need in zip(inputs, needs.flat, strict=True)]
        wanted = [tensor for tensor, need in zip(inputs, chosen, strict=True) if need and tensor is not None]
        found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
        return Inputs.from_flat(call.cell, [next(found) if need else None for need in chosen])

    def tangent(self, call: LayerCall, after: States, tangents: Inputs[Tensor | None]) -> States:
        """Return the tangents of the outputs."""
        if not self.closed:
            refuse_tangents(self.name)
        return self.kernels.tangent(partial(run_operation, self), call, after, tangents)

    def kept(self, inputs: Sequence[Any], after: Sequence[Tensor]) -> Sequence[Any]:
        """Return the inputs to save for derivatives, among which those of a closed operation don't read x."""
        return (after[0], *inputs[1:]) if self.closed else inputs

    def _define(self, name: str, schema: str, direction: str) -> Any:
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, getattr(self, f"_run_{direction}"), "CompositeExplicitAutograd")
        torch.library.register_fake(f"recurl::{name}", getattr(self, f"_fake_{direction}"), lib=_library)
        torch.library.register_vmap(f"recurl::{name}", getattr(self, f"_map_{direction}"), lib=_library)
        op = getattr(torch.ops.recurl, name).default
        for device in ("cpu", "cuda"):
            _library.impl(name, _in_own_dtype(op, device), "Autocast" + device.upper())
        return op

    def _called(self, arguments: Arguments) -> LayerCall:
        """Return the call after the import of its kernels, which may define its cell."""
        _ = self.kernels
        return call_of(arguments)

    def _run_forward(self, *args: Any) -> list[Tensor]:
        call = self._called(Arguments(*args[:_CALL]))
        if have_tangents(call.inputs):
            refuse_tangents(self.name)
        after, saved = self.run(call, args[_CALL])
        return [*(state.contiguous() for state in after), *saved]

    def _fake_forward(self, *args: Any) -> list[Tensor]:
        call = self._called(Arguments(*args[:_CALL]))
        after = [state.new_empty(state.shape) for state in call.states[: len(call.cell.state_names)]]
        if not call.cell.features_are_first_state:
            features, _ = call.cell.step(call.x, call.states, *call.weights)
            after.insert(0, call.x.new_empty(features.shape))
        return [*after, *(self.kernels.saved_like(call) if args[_CALL] else ())]

    def _run_backward(self, *args: Any) -> list[Tensor]:
        arguments, (after, saved, some, needs) = Arguments(*args[:_CALL]), args[_CALL:]
        grads = _dense(some, after)
        call = self._called(arguments)
        with without_autocast(call.x.device):
            found = self.kernels.backward(call, tuple(after), tuple(saved), grads, arguments.spread(needs))
        given = [*arguments.tensors, *after, *saved, *grads]
        return _without_aliasing([gradient.contiguous() for gradient in found.flat if gradient is not None], given)

    def _fake_backward(self, *args: Any) -> list[Tensor]:
        tensors = Arguments(*args[:_CALL]).tensors
        return [tensor.new_empty(tensor.shape) for tensor, need in zip(tensors, args[-1], strict=True) if need]

    def _save_for_gradient(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        arguments = Arguments(*inputs[:_CALL])
        ctx.bare, ctx.num_outputs = _bare(arguments), count_outputs(cell_named(arguments.cell))
        ctx.mark_non_differentiable(*output[ctx.num_outputs :])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(arguments.starts, *self.kept(arguments.tensors, output), *output)

    def _gradient(self, ctx: Any, some: Sequence[Tensor | None]) -> tuple[Any, ...]:
        arguments, after, saved = _restored(ctx)
        needs = Arguments(*ctx.needs_input_grad[:_CALL]).tensors
        if self.closed and torch.is_grad_enabled():

            def run(call: LayerCall) -> States:
                return tuple(self.forward(*arguments_of(call), False))

            grads = _dense(some[: len(after)], after)
            inputs = self.gradients_again(call_of(arguments), after, grads, arguments.spread(needs), run)
            found = arguments.gathered(inputs)
        else:
            left = iter(self.backward(*arguments, list(after), list(saved), list(some[: len(after)]), needs))
            found = [next(left) if need else None for need in needs]
        x, weights, states, *_ = arguments.with_tensors(found)
        return (x, weights, states, *[None] * (_CALL - 3), None)

    def _map_forward(self, info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[list[Tensor], list[int]]:
        # Nothing is saved: backward could not tell whether gates belong to the folded stream or to a single model.
        return _map(lambda *call: self.forward(*call, False), info.batch_size, in_dims[:_CALL], args[:_CALL])

    def _map_backward(self, info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[list[Tensor], list[int]]:
        return _map_each(self.backward, info.batch_size, in_dims, args)


def run_operation(operation: Operation, call: LayerCall) -> States:
    """Run a call; the outputs are differentiable."""
    inputs, keep = call.inputs, not call.options.recompute
    wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
    if is_compiling() or _is_seen_by_modes(call):
        refuse_forward_mode(operation.name)
        return tuple(operation.forward(*arguments_of(call), wanted and keep)[: count_outputs(call.cell)])
    tangents = is_forward_mode()
    if tangents and (after := operation.differentiable(call)) is not None:
        return after
    if is_functorch_active():
        arguments = arguments_of(call)
        return _Transformed.apply(operation, _bare(arguments), arguments.starts, *arguments.tensors)
    if wanted or tangents:
        return _Recurrence.apply(operation, call, keep, *inputs)
    return operation.run(call, False)[0]


def _is_seen_by_modes(call: LayerCall) -> bool:
    """Return whether dispatch modes or tensor subclasses, such as fake tensors, must see the call."""
    plain = not are_modes_active() and all(tensor is None or type(tensor) in PLAIN_TYPES for tensor in call.inputs)
    return not plain and not is_functorch_active() and not is_forward_mode()


def _dense(some: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> States:
    """Return the gradients of the outputs, with an expanded zero for each missing one."""
    each = zip(some, outputs, strict=True)
    return tuple([output.new_zeros(()).expand_as(output) if grad is None else grad for grad, output in each])


class _Recurrence(torch.autograd.Function):
    """Autograd function for eager mode: (operation, call, keep, *inputs) -> outputs."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, call: LayerCall, keep: bool, *inputs: Tensor | None) -> States:
        after, saved = operation.run(call, keep)
        ctx.operation, ctx.num_inputs, ctx.num_outputs = operation, len(inputs), len(after)
        # Everything except the tensors, which must be accessed only through save_for_backward.
        ctx.frame = (call.cell, call.boundaries, call.options)
        ctx.set_materialize_grads(False)
        kept = (*operation.kept(inputs, after), *after)
        ctx.save_for_backward(*kept, *saved)
        if is_forward_mode():
            ctx.save_for_forward(*kept)
        return after

    @staticmethod
    def backward(ctx: Any, *some: Tensor | None) -> tuple[Tensor | None, ...]:
        operation, call, after, saved = _recalled(ctx)
        grads, needs = _dense(some, after), Inputs.from_flat(call.cell, ctx.needs_input_grad[3:])
        with without_autocast(call.x.device):
            if needs_double_backward(grads) or (operation.closed and is_functorch_active()):
                found = operation.gradients_again(call, after, grads, needs, partial(run_operation, operation))
            else:
                found = operation.kernels.backward(call, after, saved, grads, needs)
        return None, None, None, *found.flat

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> States:
        operation, call, after, _ = _recalled(ctx)
        along = Inputs.from_flat(call.cell, tangents[3:])
        return operation.tangent(call, after, along)


def _recalled(ctx: Any) -> tuple[Operation, LayerCall, States, States]:
    """Return operation, call, outputs and saved tensors of a call in eager mode."""
    tensors: tuple[Any, ...] = ctx.saved_tensors
    cell, boundaries, options = ctx.frame
    (x, weights, states), kept = Inputs.from_flat(cell, tensors[: ctx.num_inputs]), tensors[ctx.num_inputs :]
    call = LayerCall(cell, weights, x, states, boundaries, options)
    return ctx.operation, call, kept[: ctx.num_outputs], kept[ctx.num_outputs :]


def _bare(arguments: Arguments) -> Arguments:
    """Return the arguments without tensors, which an autograd.Function takes one by one."""
    return arguments.with_tensors([None] * len(arguments.tensors))._replace(starts=None)


def _complete(bare: Arguments, starts: Any, tensors: Sequence[Any]) -> Arguments:
    return bare.with_tensors(tensors)._replace(starts=starts)


class _Transformed(torch.autograd.Function):
    """Autograd function for torch.func: (operation, bare arguments, starts, *tensors) -> outputs, saving no gates."""

    @staticmethod
    def forward(operation: Operation, bare: Arguments, starts: Tensor, *tensors: Tensor) -> States:
        return operation.run(call_of(_complete(bare, starts, tensors)), False)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: States) -> None:
        ctx.operation, ctx.bare, starts, *tensors = inputs
        kept = (starts, *ctx.operation.kept(tensors, output), *output)
        ctx.num_outputs = len(output)
        ctx.save_for_backward(*kept)
        if is_forward_mode():
            ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        operation, (arguments, after, _) = ctx.operation, _restored(ctx)
        if operation.closed:
            needs = arguments.spread(ctx.needs_input_grad[3:])
            run = partial(run_operation, operation)
            found = arguments.gathered(operation.gradients_again(call_of(arguments), after, grads, needs, run))
        else:
            found = _TransformedBackward.apply(operation, ctx.bare, *ctx.saved_tensors, *grads)
        return None, None, None, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> States:
        arguments, after, _ = _restored(ctx)
        along = arguments.spread(tangents[3:])
        return ctx.operation.tangent(call_of(arguments), after, along)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[States, tuple[int, ...]]:
        operation, bare, *tensors = inputs

        def run(*call: Any) -> States:
            arguments = Arguments(*call)
            return _Transformed.apply(operation, _bare(arguments), arguments.starts, *arguments.tensors)

        unmapped = bare._replace(given=None, cell=None, precision=None, compute_dtype=None, rows=None)
        dims = _complete(unmapped, in_dims[2], in_dims[3:])
        stacked, dims = _map(run, info.batch_size, dims, _complete(bare, tensors[0], tensors[1:]))
        return tuple(stacked), tuple(dims)


def _restored(ctx: Any) -> tuple[Arguments, States, States]:
    """Return arguments, outputs and saved tensors of a call that isn't in eager mode."""
    starts, *tensors = ctx.saved_tensors
    inputs = len(ctx.bare.tensors)
    end = inputs + ctx.num_outputs
    return _complete(ctx.bare, starts, tensors[:inputs]), tuple(tensors[inputs:end]), tuple(tensors[end:])


class _TransformedBackward(torch.autograd.Function):
    """Gradients of all tensors: (operation, bare arguments, starts, *tensors, *outputs, *gradients of the outputs)."""

    @staticmethod
    def forward(operation: Operation, bare: Arguments, starts: Tensor, *tensors: Tensor) -> States:
        inputs, count = len(bare.tensors), (len(tensors) - len(bare.tensors)) // 2
        after, grads = tensors[inputs : inputs + count], tensors[inputs + count :]
        arguments = _complete(bare, starts, tensors[:inputs])
        return tuple(operation.backward(*arguments, list(after), [], list(grads), [True] * inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: States) -> None:
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        refuse_double_backward(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        refuse_tangents(ctx.name)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[States, tuple[int, ...]]:
        in_dims = (
            None,
            None,
            *in_dims[2:],
        )  # nothing is mapped in the bare arguments, which torch sees as a nested tuple
        stacked, dims = _map_each(_TransformedBackward.apply, info.batch_size, in_dims, args)
        return tuple(stacked), tuple(dims)


def _without_aliasing(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return operator outputs that share memory neither with inputs nor with each other, cloned where necessary."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    result: list[Tensor] = []
    for output in outputs:
        own = output.clone() if output.untyped_storage().data_ptr() in taken else output
        taken.add(own.untyped_storage().data_ptr())
        result.append(own)
    return result


def _in_own_dtype(op: Any, device: str) -> Callable[..., Any]:
    """Return the autocast rule: cast inputs and states to the dtype of the weights, then run without autocast."""

    def run(*args: Any) -> Any:
        arguments = Arguments(*args[:_CALL])
        with torch.autocast(device, enabled=False):
            if arguments.weights:
                dtype = arguments.weights[0].dtype
                states = [state.to(dtype) for state in arguments.states]
                arguments = arguments._replace(x=arguments.x.to(dtype), states=states)
            return op(*arguments, *args[_CALL:])

    return run


def _map(
    run: Callable[..., Sequence[Tensor]], size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[list[Tensor], list[int]]:
    """Run over a mapped dimension: one model after another if weights are mapped, else as one stream.

    The mapped streams are concatenated; each begins with the start of a segment.
    """
    given, dims = Arguments(*args), Arguments(*in_dims)
    if any(dim is not None for dim in dims.weights):
        return _map_each(run, size, in_dims, args)

    def stream(value: Tensor, dim: int | None) -> Tensor:
        mapped = value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
        return mapped.flatten(0, 1)

    folded = given._replace(
        x=stream(given.x, dims.x),
        starts=stream(given.starts, dims.starts),
        rows=size * given.rows,
        states=[stream(state, dim) for state, dim in zip(given.states, dims.states, strict=True)],
    )
    stacked = [stream.unflatten(0, (size, -1)) for stream in run(*folded)]
    return stacked, [0] * len(stacked)


def _map_each(
    run: Callable[..., Sequence[Tensor]], size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[list[Tensor], list[int]]:
    """Run over the mapped elements one by one, for mapped weights or for separate weight gradients per element."""
    results = [run(*_slice(args, in_dims, index)) for index in range(size)]
    stacked = [torch.stack(list(values)) for values in zip(*results, strict=True)]
    return stacked, [0] * len(stacked)


def _slice(args: Sequence[Any], in_dims: Sequence[Any], index: int) -> list[Any]:
    """Return the arguments of one mapped element."""

    def one(value: Any, dim: Any) -> Any:
        if isinstance(dim, list | tuple):
            return [one(item, d) for item, d in zip(value, cast(Sequence[Any], dim), strict=True)]
        return value if dim is None else value.select(dim, index)

    return [one(value, dim) for value, dim in zip(args, in_dims, strict=False)]
