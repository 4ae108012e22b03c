"""Kernels with hand-written derivatives, and what they are to ``torch.library``.

A backend brings a pair of pure functions (:class:`Kernels`); ``kernel_backend`` makes a backend of them. While
``torch.compile`` and ``torch.export`` trace, they are the operators ``recurl::<name>_forward`` and ``_backward``:

* fake: shapes follow from N, H and P alone, never from the boundaries.
* autograd: first derivatives; taking second ones raises.
* autocast: a recurrence computes in the dtype of its weights, to which the other inputs are cast.
* vmap: mapped inputs, states and boundaries become one longer stream; mapped weights (an ensemble) a loop over models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor
from torch.library import Library

from recurl.autograd import have_tangents, is_forward_mode
from recurl.errors import UnsupportedError
from recurl.recurrence.backend import LayerCall, Options, Support, record_run, without_autocast
from recurl.recurrence.boundaries import Boundaries
from recurl.recurrence.cells import CELLS, LayerWeights, States

Gradients = tuple[Tensor | None, ...]


class Kernels(Protocol):
    """One layer in one direction, forward and backward, as pure functions: no autograd, no autocast, inside.

    Attributes:
        name: of the backend and, as a prefix, of its operators.
    """

    name: str

    def missing(self) -> str | None:
        """Return what must be installed before these kernels can run at all, or None."""
        ...

    def unsupported(self, support: Support) -> str | None:
        """Return why these kernels can't serve, or None if they can."""
        ...

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
        """Return the states after every token, in token order, and what :meth:`backward` needs.

        With ``keep`` false, because no gradient is wanted or because gates are computed again, that is ``()``.
        """
        ...

    def backward(
        self, call: LayerCall, after: States, saved: tuple[Tensor, ...], grads: States, needs: tuple[bool, ...]
    ) -> Gradients:
        """Return the gradients of (x, w_ih, w_hh, b_ih, b_hh, w_hr, *states), None where ``needs`` is false.

        Args:
            call: what :meth:`forward` got.
            after: the states that it returned.
            saved: what it saved; when ``()``, the gates are computed again, all tokens at once.
            grads: gradients of ``after``, each ``[N, ...]``, possibly expanded.
            needs: which gradients are wanted. Those of the states are dense ``[N, ...]``, zero except at the first
                token of each segment.
        """
        ...

    def saved_like(self, call: LayerCall) -> tuple[Tensor, ...]:
        """Return empty tensors of the shapes, dtypes and layouts that :meth:`forward` saves with ``keep``."""
        ...

    def differentiable(self, call: LayerCall) -> States | None:
        """Return the states after every token by operations that torch derives, to any order and forwards; or None."""
        ...


def inputs_of(call: LayerCall) -> tuple[Tensor | None, ...]:
    """Return what a call can be differentiated by: (x, w_ih, w_hh, b_ih, b_hh, w_hr, *states)."""
    w = call.weights
    return (call.x, w.w_ih, w.w_hh, w.b_ih, w.b_hh, w.w_hr, *call.states)


def with_inputs(call: LayerCall, inputs: tuple[Tensor | None, ...]) -> LayerCall:
    """Return ``call`` with other tensors, in the order of :func:`inputs_of`."""
    x, w_ih, w_hh, b_ih, b_hh, w_hr, *states = cast(Any, inputs)
    weights = LayerWeights(w_ih, w_hh, b_ih, b_hh, w_hr)
    return LayerCall(call.cell, weights, x, tuple(states), call.boundaries, call.options)


def run_forward(kernels: Kernels, call: LayerCall, *, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
    """Run the kernels, outside autocast, and take note of it."""
    record_run(kernels.name)
    with without_autocast(call.x.device):
        return kernels.forward(call, keep)


def run_differentiable(kernels: Kernels, call: LayerCall) -> States | None:
    """Run by operations that torch can derive in any mode, outside autocast, and take note of it; None without such."""
    with without_autocast(call.x.device):
        after = kernels.differentiable(call)
    if after is not None:
        record_run(kernels.name)
    return after


def refuse_tangents(name: str) -> NoReturn:
    """Raise: kernels have no derivatives of forward mode."""
    raise UnsupportedError(
        f"The recurrent backend {name!r} has no derivatives of forward mode here (torch.func.jvp, jacfwd, "
        "torch.autograd.forward_ad): use recurrent_backend='loop', outside torch.compile and torch.export."
    )


def refuse_forward_mode(name: str) -> None:
    """Raise where forward mode is on, for operators would lose the tangents in silence."""
    if is_forward_mode():
        refuse_tangents(name)


def refuse_twice(name: str) -> NoReturn:
    """Raise: kernels are differentiated once."""
    raise UnsupportedError(
        f"The recurrent backend {name!r} has no second derivatives here, so its gradients can't be differentiated "
        "again. For double backward use recurrent_backend='loop', outside torch.compile and torch.func."
    )


_INPUTS = "Tensor x, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? w_hr, Tensor[] states, Tensor starts"
_OPTIONS = "str cell, str precision, ScalarType compute_dtype"
_FORWARD = f"({_INPUTS}, {_OPTIONS}, bool keep) -> Tensor[]"
_BACKWARD = f"({_INPUTS}, {_OPTIONS}, Tensor[] after, Tensor[] saved, Tensor[] grads, bool[] needs) -> Tensor[]"
_CALL = 11  # how many arguments make up a LayerCall
_WEIGHTS, STATES, STARTS = slice(1, 6), 6, 7

_library = Library("recurl", "FRAGMENT")  # its end would take the operators away


class Operators:
    """The registered operators of one pair of kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.forward = self._define("forward", _FORWARD, self._run_forward, self._fake_forward)
        self.backward = self._define("backward", _BACKWARD, self._run_backward, self._fake_backward)
        forward, backward = f"recurl::{kernels.name}_forward", f"recurl::{kernels.name}_backward"
        torch.library.register_autograd(forward, self._gradient, setup_context=_keep_for_gradient, lib=_library)
        torch.library.register_autograd(backward, lambda ctx, *grads: refuse_twice(kernels.name), lib=_library)
        torch.library.register_vmap(forward, self._map_forward, lib=_library)
        torch.library.register_vmap(backward, self._map_backward, lib=_library)

    def __call__(self, call: LayerCall, keep: bool) -> States:
        """Run the forward operator; differentiable."""
        results = self.forward(*arguments_of(call), keep)
        return tuple(results[: len(call.states)])

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
        call = _call_of(args)
        if have_tangents(inputs_of(call)):
            refuse_tangents(self.kernels.name)
        after, saved = run_forward(self.kernels, call, keep=args[_CALL])
        return [*after, *saved]

    def _fake_forward(self, *args: Any) -> list[Tensor]:
        call = _call_of(args)
        after = [call.x.new_empty(call.x.shape[0], size) for size in call.weights.state_sizes(call.cell)]
        return [*after, *(self.kernels.saved_like(call) if args[_CALL] else ())]

    def _run_backward(self, *args: Any) -> list[Tensor]:
        after, saved, grads, needs = args[_CALL:]
        call = _call_of(args)
        with without_autocast(call.x.device):
            gradients = self.kernels.backward(call, tuple(after), tuple(saved), tuple(grads), tuple(needs))
        return [gradient for gradient in gradients if gradient is not None]

    def _fake_backward(self, *args: Any) -> list[Tensor]:
        inputs = inputs_of(_call_of(args))
        return [t.new_empty(t.shape) for t, need in zip(inputs, args[-1], strict=True) if need and t is not None]

    def _gradient(self, ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        args, after, saved = _recall(ctx)
        dense = [like.new_zeros(()).expand_as(like) if g is None else g for g, like in zip(grads, after, strict=False)]
        wanted = ctx.needs_input_grad
        needs = [*wanted[:STATES], *wanted[STATES]]
        found = iter(self.backward(*args, after, saved, dense, needs))
        gradients = [next(found) if need else None for need in needs]
        rest = [None] * (_CALL - STARTS + 1)
        return (*gradients[:STATES], gradients[STATES:], *rest)

    def _map_forward(self, info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[list[Tensor], list[int]]:
        # Nothing is saved: whether gates belong to the folded stream or to one model's would be lost on the way.
        return map_recurrence(lambda *call: self.forward(*call, False), info.batch_size, in_dims[:_CALL], args[:_CALL])

    def _map_backward(self, info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[list[Tensor], list[int]]:
        return map_each(self.backward, info.batch_size, in_dims, args)


def map_recurrence(
    run: Callable[..., Sequence[Tensor]], size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[list[Tensor], list[int]]:
    """Mapped weights: one model after the other. Else the mapped streams become one."""
    if any(dim is not None for dim in in_dims[_WEIGHTS]):
        return map_each(run, size, in_dims, args)
    stacked = [stream.unflatten(0, (size, -1)) for stream in run(*_fold(args, in_dims, size))]
    return stacked, [0] * len(stacked)


def map_each(
    run: Callable[..., Sequence[Tensor]], size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[list[Tensor], list[int]]:
    """One mapped element after the other: for mapped weights, or for gradients of weights that are wanted apart."""
    results = [run(*_slice(args, in_dims, index)) for index in range(size)]
    stacked = [torch.stack(list(values)) for values in zip(*results, strict=True)]
    return stacked, [0] * len(stacked)


def arguments_of(call: LayerCall) -> tuple[Any, ...]:
    """A call as arguments of an operator."""
    w, options = call.weights, call.options
    tensors = (call.x, w.w_ih, w.w_hh, w.b_ih, w.b_hh, w.w_hr, list(call.states), call.boundaries.starts)
    return (*tensors, call.cell.name, options.precision, options.compute_dtype)


def _call_of(args: Sequence[Any]) -> LayerCall:
    """The call that arguments of an operator stand for."""
    x, *weights, states, starts, cell, precision, compute_dtype = args[:_CALL]
    boundaries, options = Boundaries(starts, (x.shape[0],)), Options(False, precision, compute_dtype)
    return LayerCall(CELLS[cell], LayerWeights(*weights), x, tuple(states), boundaries, options)


def _keep_for_gradient(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    *tensors, states, starts = inputs[: STARTS + 1]
    after, saved = output[: len(states)], output[len(states) :]
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *states, starts, *after, *saved)
    ctx.num_states, ctx.rest = len(states), inputs[STARTS + 1 : _CALL]


def _recall(ctx: Any) -> tuple[tuple[Any, ...], list[Tensor], list[Tensor]]:
    """What :func:`_keep_for_gradient` kept: the arguments of the call, the states after, what was saved."""
    tensors, count = ctx.saved_tensors, ctx.num_states
    states, (starts, *kept) = tensors[STATES : STATES + count], tensors[STATES + count :]
    return (*tensors[:STATES], list(states), starts, *ctx.rest), kept[:count], kept[count:]


def _in_weights_dtype(op: Any, device: str) -> Callable[..., Any]:
    """The autocast rule: cast inputs and gradients to the dtype of the weights, then run without autocast."""

    def run(x: Tensor, w_ih: Tensor, *args: Any) -> Any:
        *weights, states, starts, cell, precision, compute_dtype = args[: _CALL - 2]
        dtype = w_ih.dtype
        with torch.autocast(device, enabled=False):
            cast_states = [state.to(dtype) for state in states]
            options = (cell, precision, compute_dtype)
            return op(x.to(dtype), w_ih, *weights, cast_states, starts, *options, *args[_CALL - 2 :])

    return run


def _slice(args: Sequence[Any], in_dims: Sequence[Any], index: int) -> list[Any]:
    """The arguments of one mapped element."""

    def one(value: Any, dim: Any) -> Any:
        if isinstance(dim, list | tuple):
            return [one(item, d) for item, d in zip(value, cast(Sequence[Any], dim), strict=True)]
        return value if dim is None else value.select(dim, index)

    return [one(value, dim) for value, dim in zip(args, in_dims, strict=False)]


def _fold(args: Sequence[Any], in_dims: Sequence[Any], size: int) -> list[Any]:
    """Put the mapped streams one after the other; each begins with the start of a segment."""

    def stream(value: Tensor, dim: int | None) -> Tensor:
        mapped = value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
        return mapped.reshape(-1, *mapped.shape[2:])

    folded = list(args)
    folded[0], folded[STARTS] = stream(args[0], in_dims[0]), stream(args[STARTS], in_dims[STARTS])
    folded[STATES] = [stream(state, dim) for state, dim in zip(args[STATES], in_dims[STATES], strict=True)]
    return folded
