"""Operators of ``torch.library`` built from kernels.

A backend provides a pair of pure functions, ``kernels.Kernels``; ``kernel_backend`` builds the backend from them. While
``torch.compile`` or ``torch.export`` is tracing, they appear as the operators ``recurl::<name>_forward`` and
``recurl::<name>_backward``:

* fake: output shapes follow from input shapes alone, never from the boundaries.
* autograd: first derivatives only; differentiating twice raises an error.
* autocast: a recurrence computes in the dtype of its weights, and the other inputs are cast to it.
* vmap: mapped inputs, states and boundaries become one longer stream; mapped weights (an ensemble) become a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.library import Library

from recurl.core.autograd import have_tangents, is_forward_mode
from recurl.core.errors import UnsupportedError
from recurl.core.torch_compat import is_compiling, is_known
from recurl.recurrence.backend import LayerCall, Options, record_run, without_autocast
from recurl.recurrence.cells import Cell, States, cell_named, remember
from recurl.recurrence.kernels import Gradients, Inputs, Kernels, count_outputs, inputs_of, with_inputs
from recurl.sequences.boundaries import Boundaries


def run_forward(kernels: Kernels, call: LayerCall, *, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
    """Run the forward kernel outside autocast and record the run."""
    record_run(kernels.name)
    with without_autocast(call.x.device):
        return kernels.forward(call, keep)


def run_differentiable(kernels: Kernels, call: LayerCall) -> States | None:
    """Run the kernels' differentiable form outside autocast and record the run; None if there is no such form."""
    with without_autocast(call.x.device):
        after = kernels.differentiable(call)
    if after is not None:
        record_run(kernels.name)
    return after


def backward_by_autograd(kernels: Kernels, call: LayerCall, grads: States, needs: Inputs[bool]) -> Gradients:
    """Return the gradients of a call by rerunning and differentiating ``kernels.differentiable``.

    This uses ``torch.func``, since autograd is disabled inside an operator.
    """
    inputs = inputs_of(call).flat
    chosen = [tensor is not None and need for tensor, need in zip(inputs, needs.flat, strict=True)]

    def run(*wanted: Tensor) -> States:
        left = iter(wanted)
        flat = [next(left) if need else tensor for tensor, need in zip(inputs, chosen, strict=True)]
        outputs = kernels.differentiable(with_inputs(call, Inputs.from_flat(call.cell, flat)))
        assert outputs is not None
        return outputs

    wanted = [tensor for tensor, need in zip(inputs, chosen, strict=True) if need]
    pull_back = torch.func.vjp(run, *wanted)[1]
    found = iter(pull_back(tuple(grads)))
    return Inputs.from_flat(call.cell, [next(found) if need else None for need in chosen])


def dense_gradients(some: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> States:
    """Return the gradients of the outputs, with an expanded zero for each missing one."""
    each = zip(some, outputs, strict=True)
    return tuple([output.new_zeros(()).expand_as(output) if grad is None else grad for grad, output in each])


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


_INPUTS = "Tensor x, Tensor[] weights, Tensor[] states, Tensor starts"
_OPTIONS = "bool[] given, str cell, str precision, ScalarType compute_dtype, int rows"
_FORWARD = f"({_INPUTS}, {_OPTIONS}, bool keep) -> Tensor[]"
_BACKWARD = f"({_INPUTS}, {_OPTIONS}, Tensor[] after, Tensor[] saved, Tensor?[] grads, bool[] needs) -> Tensor[]"


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
    given: list[bool] | None
    cell: str | None
    precision: str | None
    compute_dtype: torch.dtype | None
    rows: int | None

    @property
    def tensors(self) -> list[Any]:
        """Arguments that may need gradients: x, weights, states."""
        return [self.x, *self.weights, *self.states]


_CALL = len(Arguments._fields)

_library = Library("recurl", "FRAGMENT")  # kept alive: deleting it would unregister the operators


class Operators:
    """Registered operators of one pair of kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.forward = self._define("forward", _FORWARD, self._run_forward, self._fake_forward)
        self.backward = self._define("backward", _BACKWARD, self._run_backward, self._fake_backward)
        forward, backward = f"recurl::{kernels.name}_forward", f"recurl::{kernels.name}_backward"
        torch.library.register_autograd(forward, self._gradient, setup_context=_save_for_gradient, lib=_library)
        torch.library.register_autograd(
            backward, lambda ctx, *grads: refuse_double_backward(kernels.name), lib=_library
        )
        torch.library.register_vmap(forward, self._map_forward, lib=_library)
        torch.library.register_vmap(backward, self._map_backward, lib=_library)

    def __call__(self, call: LayerCall, keep: bool) -> States:
        """Run the differentiable forward operator."""
        results = self.forward(*arguments_of(call), keep)
        return tuple(results[: count_outputs(call.cell)])

    def _define(self, direction: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        name = f"{self.kernels.name}_{direction}"
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"recurl::{name}", fake, lib=_library)
        op = getattr(torch.ops.recurl, name).default
        for device in ("cpu", "cuda"):
            _library.impl(name, _in_weights_dtype(op, device), "Autocast" + device.upper())
        return op

    def _run_forward(self, *args: Any) -> list[Tensor]:
        call = call_of(Arguments(*args[:_CALL]))
        if have_tangents(inputs_of(call).flat):
            refuse_tangents(self.kernels.name)
        after, saved = run_forward(self.kernels, call, keep=args[_CALL])
        return [*after, *saved]

    def _fake_forward(self, *args: Any) -> list[Tensor]:
        call = call_of(Arguments(*args[:_CALL]))
        after = [call.x.new_empty(state.shape) for state in call.states]
        if not call.cell.features_are_first_state:
            features, _ = call.cell.step(call.x, call.states, *call.weights)
            after.insert(0, call.x.new_empty(features.shape))
        return [*after, *(self.kernels.saved_like(call) if args[_CALL] else ())]

    def _run_backward(self, *args: Any) -> list[Tensor]:
        after, saved, some, needs = args[_CALL:]
        grads = dense_gradients(some, after)
        arguments = Arguments(*args[:_CALL])
        call = call_of(arguments)
        with without_autocast(call.x.device):
            wanted = _each_input(call.cell, arguments, needs)
            gradients = self.kernels.backward(call, tuple(after), tuple(saved), tuple(grads), wanted)
        given = [*arguments.tensors, *after, *saved, *grads]
        return _without_aliasing([gradient for gradient in gradients.flat if gradient is not None], given)

    def _fake_backward(self, *args: Any) -> list[Tensor]:
        tensors = Arguments(*args[:_CALL]).tensors
        return [tensor.new_empty(tensor.shape) for tensor, need in zip(tensors, args[-1], strict=True) if need]

    def _gradient(self, ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        arguments, after, saved = _restore(ctx)
        wanted = ctx.needs_input_grad[:_CALL]
        needs = Arguments(*wanted).tensors
        found = iter(self.backward(*arguments, after, saved, list(grads[: len(after)]), needs))
        x, *others = (next(found) if need else None for need in needs)
        split = len(arguments.weights)
        without = [None] * (_CALL - 3)  # starts and options
        return (x, others[:split], others[split:], *without, None)

    def _map_forward(self, info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[list[Tensor], list[int]]:
        # Nothing is saved: backward could not tell whether gates belong to the folded stream or to a single model.
        return map_recurrence(lambda *call: self.forward(*call, False), info.batch_size, in_dims[:_CALL], args[:_CALL])

    def _map_backward(self, info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[list[Tensor], list[int]]:
        return map_each(self.backward, info.batch_size, in_dims, args)


def map_recurrence(
    run: Callable[..., Sequence[Tensor]], size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[list[Tensor], list[int]]:
    """Run over a mapped dimension: one model after another if weights are mapped, else as one folded stream."""
    if any(dim is not None for dim in Arguments(*in_dims).weights):
        return map_each(run, size, in_dims, args)
    stacked = [stream.unflatten(0, (size, -1)) for stream in run(*_fold(Arguments(*args), Arguments(*in_dims), size))]
    return stacked, [0] * len(stacked)


def map_each(
    run: Callable[..., Sequence[Tensor]], size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[list[Tensor], list[int]]:
    """Run over the mapped elements one by one, for mapped weights or for separate weight gradients per element."""
    results = [run(*_slice(args, in_dims, index)) for index in range(size)]
    stacked = [torch.stack(list(values)) for values in zip(*results, strict=True)]
    return stacked, [0] * len(stacked)


def arguments_of(call: LayerCall) -> Arguments:
    """Convert a call to operator arguments."""
    if not is_compiling():
        remember(call.cell)
    return with_options(inputs_of(call), call.boundaries.starts, *options_of(call))


def options_of(call: LayerCall) -> tuple[str, str, torch.dtype, int]:
    """Return the non-tensor arguments of an operator: cell, precision, compute dtype, rows."""
    return call.cell.name, call.options.precision, call.options.compute_dtype, known_rows(call)


def known_rows(call: LayerCall) -> int:
    """Return the number of rows in the batch, used to select kernels; 1 if it is symbolic under ``torch.compile``."""
    rows = call.boundaries.rows
    return rows if is_known(rows) else 1


def with_options(
    inputs: Inputs[Any], starts: Tensor, cell: str, precision: str, dtype: torch.dtype, rows: int
) -> Arguments:
    """Build operator arguments from inputs and options."""
    given = [weight is not None for weight in inputs.weights]
    weights = [weight for weight in inputs.weights if weight is not None]
    return Arguments(inputs.x, weights, list(inputs.states), starts, given, cell, precision, dtype, rows)


def call_of(arguments: Arguments) -> LayerCall:
    """Convert operator arguments back to a call."""
    x, starts = arguments.x, arguments.starts
    cell = cell_named(cast(str, arguments.cell))
    inputs = _each_input(cell, arguments, arguments.tensors)
    options = Options(False, cast(str, arguments.precision), cast(torch.dtype, arguments.compute_dtype))
    rows = cast(int, arguments.rows)
    return LayerCall(cell, inputs.weights, x, inputs.states, Boundaries(starts, (rows, x.shape[0] // rows)), options)


def _each_input(cell: Cell, arguments: Arguments, values: Sequence[Any]) -> Inputs[Any]:
    """Arrange one value per tensor of ``arguments.tensors`` as inputs of the cell, with None for absent weights."""
    left = iter(values)
    x = next(left)
    weights = [next(left) if given else None for given in cast(list[bool], arguments.given)]
    return Inputs(x, cell.pack(weights), tuple(left))


def _without_aliasing(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return operator outputs that share memory neither with inputs nor with each other, cloned where necessary."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    result: list[Tensor] = []
    for output in outputs:
        own = output.clone() if output.untyped_storage().data_ptr() in taken else output
        taken.add(own.untyped_storage().data_ptr())
        result.append(own)
    return result


def _save_for_gradient(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    arguments = Arguments(*inputs[:_CALL])
    count = count_outputs(cell_named(cast(str, arguments.cell)))
    after, saved = output[:count], output[count:]
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arguments.tensors, arguments.starts, *after, *saved)
    ctx.counts = len(arguments.weights), len(arguments.states), count
    ctx.options = arguments[4:]


def _restore(ctx: Any) -> tuple[Arguments, list[Tensor], list[Tensor]]:
    """Return what :func:`_save_for_gradient` stored: the call's arguments, the outputs and the saved tensors."""
    weights, states, count = ctx.counts
    x, *tensors = ctx.saved_tensors
    starts, *kept = tensors[weights + states :]
    arguments = Arguments(x, tensors[:weights], tensors[weights : weights + states], starts, *ctx.options)
    return arguments, kept[:count], kept[count:]


def _in_weights_dtype(op: Any, device: str) -> Callable[..., Any]:
    """Return the autocast rule: cast inputs and states to the dtype of the weights, then run without autocast."""

    def run(*args: Any) -> Any:
        arguments = Arguments(*args[:_CALL])
        dtype = arguments.weights[0].dtype
        with torch.autocast(device, enabled=False):
            states = [state.to(dtype) for state in arguments.states]
            return op(*arguments._replace(x=arguments.x.to(dtype), states=states), *args[_CALL:])

    return run


def _slice(args: Sequence[Any], in_dims: Sequence[Any], index: int) -> list[Any]:
    """Return the arguments of one mapped element."""

    def one(value: Any, dim: Any) -> Any:
        if isinstance(dim, list | tuple):
            return [one(item, d) for item, d in zip(value, cast(Sequence[Any], dim), strict=True)]
        return value if dim is None else value.select(dim, index)

    return [one(value, dim) for value, dim in zip(args, in_dims, strict=False)]


def _fold(args: Arguments, in_dims: Arguments, size: int) -> Arguments:
    """Concatenate the mapped streams; each begins with the start of a segment."""

    def stream(value: Tensor, dim: int | None) -> Tensor:
        mapped = value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
        return mapped.reshape(-1, *mapped.shape[2:])

    return args._replace(
        x=stream(args.x, in_dims.x),
        starts=stream(args.starts, in_dims.starts),
        rows=size * cast(int, args.rows),
        states=[stream(state, dim) for state, dim in zip(args.states, in_dims.states, strict=True)],
    )
