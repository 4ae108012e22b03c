"""Operators of ``torch.library`` for linear recurrences, which represent the kernels while tracing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from recurl.core.autograd import have_tangents
from recurl.recurrence.backend import record_run
from recurl.recurrence.linear.derivatives import gradients
from recurl.recurrence.linear.kernels import LinearInputs, LinearKernels
from recurl.recurrence.linear.registry import LINEAR
from recurl.recurrence.ops import map_each, refuse_tangents
from recurl.sequences.boundaries import Boundaries

_FORWARD = "(Tensor a, Tensor b, Tensor states, Tensor starts, SymInt length, str backend) -> Tensor"
_BACKWARD = (
    "(Tensor a, Tensor h, Tensor states, Tensor grad, Tensor starts, SymInt length, bool[] needs, str backend) "
    "-> Tensor[]"
)

_library = Library("recurl", "FRAGMENT")  # kept alive: deleting it would unregister the operators


def forward(kernels: LinearKernels, inputs: LinearInputs) -> Tensor:
    """Run the forward kernel and record the run."""
    record_run(kernels.name)
    return kernels.forward(inputs)


def map_folded(
    run: Callable[..., Tensor], size: int, in_dims: Sequence[int | None], args: Sequence[Tensor]
) -> tuple[Tensor, int]:
    """Run over a mapped dimension of (a, b, states, starts).

    The mapped streams are concatenated; each begins with the start of a segment. If a constant ``a`` is mapped, the
    streams become additional channels instead, or separate runs if the boundaries are mapped too.
    """
    a, b, states, starts = (one if dim is None else one.movedim(dim, 0) for one, dim in zip(args, in_dims, strict=True))
    if in_dims[0] is not None and a.ndim == 2:
        return _map_constant(run, size, in_dims, (a, b, states, starts))

    def stream(one: Tensor, dim: int | None) -> Tensor:
        return (one.expand(size, *one.shape) if dim is None else one).flatten(0, 1)

    constant = in_dims[0] is None and a.ndim == 1
    folded = [stream(one, dim) for one, dim in zip((b, states, starts), in_dims[1:], strict=True)]
    result = run(a if constant else stream(a, in_dims[0]), *folded)
    return result.unflatten(0, (size, -1)), 0


def _map_constant(
    run: Callable[..., Tensor], size: int, in_dims: Sequence[int | None], args: tuple[Tensor, ...]
) -> tuple[Tensor, int]:
    a, b, states, starts = args
    if in_dims[3] is not None:

        def one(index: int) -> list[Tensor]:
            return [x if dim is None else x[index] for x, dim in zip(args, in_dims, strict=True)]

        return torch.stack([run(*one(index)) for index in range(size)]), 0

    def channels(one: Tensor, dim: int | None) -> Tensor:
        return (one.expand(size, *one.shape) if dim is None else one).movedim(0, 1).flatten(1)

    result = run(a.flatten(), channels(b, in_dims[1]), channels(states, in_dims[2]), starts)
    return result.unflatten(1, (size, -1)), 1


def _inputs(a: Tensor, b: Tensor, states: Tensor, starts: Tensor, length: int) -> LinearInputs:
    return LinearInputs(a, b, states, Boundaries(starts, (length,)))


def _run_forward(a: Tensor, b: Tensor, states: Tensor, starts: Tensor, length: int, backend: str) -> Tensor:
    if have_tangents((a, b, states)):
        refuse_tangents(backend)
    return forward(LINEAR.named(backend), _inputs(a, b, states, starts, length))


def _run_backward(
    a: Tensor, h: Tensor, states: Tensor, grad: Tensor, starts: Tensor, length: int, needs: list[bool], backend: str
) -> list[Tensor]:
    wanted = (needs[0], needs[1], needs[2])
    found = LINEAR.named(backend).backward(_inputs(a, h, states, starts, length), h, grad, wanted)
    return [one for one in found if one is not None]


def _fake_forward(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    return b.new_empty(b.shape)


def _fake_backward(a: Tensor, h: Tensor, states: Tensor, grad: Tensor, *others: Any) -> list[Tensor]:
    needs = others[2]
    return [one.new_empty(one.shape) for one, need in zip((a, h, states), needs, strict=True) if need]


def _save_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, states, starts, ctx.length, ctx.backend = inputs
    ctx.save_for_backward(a, output, states, starts)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, h, states, starts = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled():

        def run(inputs: LinearInputs) -> Tensor:
            return run_operator(inputs.a, inputs.b, inputs.states, inputs.boundaries.starts, ctx.length, ctx.backend)

        inputs = _inputs(a, h, states, starts, ctx.length)
        return *gradients(run, inputs, h, grad, (needs[0], needs[1], needs[2])), None, None, None
    found = iter(_backward(a, h, states, grad, starts, ctx.length, needs, ctx.backend))
    return *(next(found) if need else None for need in needs), None, None, None


def _map_forward(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Tensor, int]:
    length, backend = args[4:]

    def run(*tensors: Tensor) -> Tensor:
        return run_operator(*tensors, length, backend)

    return map_folded(run, info.batch_size, in_dims[:4], args[:4])


def _map_backward(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[list[Tensor], list[int]]:
    return map_each(_backward, info.batch_size, in_dims, args)


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], mapped: Any) -> Any:
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"recurl::{name}", fake, lib=_library)
    torch.library.register_vmap(f"recurl::{name}", mapped, lib=_library)
    return getattr(torch.ops.recurl, name).default


run_operator: Callable[..., Tensor] = _define("linear_recurrence", _FORWARD, _run_forward, _fake_forward, _map_forward)
_backward: Callable[..., list[Tensor]] = _define(
    "linear_recurrence_backward", _BACKWARD, _run_backward, _fake_backward, _map_backward
)
torch.library.register_autograd("recurl::linear_recurrence", _gradient, setup_context=_save_for_gradient, lib=_library)
