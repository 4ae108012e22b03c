"""Kernels with hand-written derivatives as differentiable operators: one wrapper for all backends that bring them.

A backend brings a pair of pure functions (:class:`Kernels`). In eager mode they run inside an ``autograd.Function``
and share the batch's :class:`Boundaries` with their cached plan.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from recurl.errors import UnsupportedError
from recurl.recurrence.backend import LayerCall, Support, record_run
from recurl.recurrence.cells import LayerWeights, States

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
        """Return the states after every token by differentiable operations, for double backward; or None."""
        ...


class KernelBackend:
    """A backend made of a pair of kernels, under their name."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.name = kernels.name

    def missing(self) -> str | None:
        """See :meth:`recurl.recurrence.backend.Backend.missing`."""
        return self.kernels.missing()

    def unsupported(self, support: Support) -> str | None:
        """See :meth:`recurl.recurrence.backend.Backend.unsupported`."""
        return self.kernels.unsupported(support)

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """See :meth:`recurl.recurrence.backend.Backend.run`."""
        inputs = _inputs(call)
        wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
        if wanted:
            after: States = _Recurrence.apply(self.kernels, call, *inputs)
        else:
            after = _forward(self.kernels, call, keep=False)[0]
        return after[0], after


def _inputs(call: LayerCall) -> tuple[Tensor | None, ...]:
    w = call.weights
    return (call.x, w.w_ih, w.w_hh, w.b_ih, w.b_hh, w.w_hr, *call.states)


def _with_inputs(call: LayerCall, inputs: tuple[Tensor | None, ...]) -> LayerCall:
    x, w_ih, w_hh, b_ih, b_hh, w_hr, *states = cast(Any, inputs)
    weights = LayerWeights(w_ih, w_hh, b_ih, b_hh, w_hr)
    return LayerCall(call.cell, weights, x, tuple(states), call.boundaries, call.options)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _forward(kernels: Kernels, call: LayerCall, *, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
    record_run(kernels.name)
    with _without_autocast(call.x.device):
        return kernels.forward(call, keep)


class _Recurrence(torch.autograd.Function):
    """The eager path: (kernels, call, *tensors of the call) -> states after every token."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, call: LayerCall, *inputs: Tensor | None) -> States:
        after, saved = _forward(kernels, call, keep=not call.options.recompute)
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
        call, needs = _with_inputs(template, inputs), tuple(ctx.needs_input_grad[2:])
        with _without_autocast(call.x.device):
            if torch.is_grad_enabled():  # the caller may want to differentiate these gradients again
                return None, None, *_backward_twice(ctx.kernels, call, inputs, grads, needs)
            after, saved = kept[: ctx.num_states], kept[ctx.num_states :]
            return None, None, *ctx.kernels.backward(call, after, saved, grads, needs)


def _backward_twice(
    kernels: Kernels, call: LayerCall, inputs: Gradients, grads: States, needs: tuple[bool, ...]
) -> Gradients:
    """Gradients that are themselves differentiable: the recurrence again, in autograd."""
    outputs = kernels.differentiable(call)
    if outputs is None:
        raise UnsupportedError(
            f"The recurrent backend {kernels.name!r} has no second derivatives, so its gradients can't be taken with "
            "create_graph=True. Use recurrent_backend='loop' for double backward."
        )
    wanted = [tensor for tensor, need in zip(inputs, needs, strict=True) if tensor is not None and need]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return tuple(
        next(found) if tensor is not None and need else None for tensor, need in zip(inputs, needs, strict=True)
    )
