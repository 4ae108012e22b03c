"""``linear_recurrence`` with its derivatives: an autograd.Function in eager mode, operators while tracing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurl.core.autograd import needs_double_backward
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.torch_compat import is_compiling, is_functorch_active
from recurl.recurrence.linear.derivatives import Gradients, gradients, tangent
from recurl.recurrence.linear.kernels import ACCUMULATED, LinearInputs, LinearKernels
from recurl.recurrence.linear.loop import ReferenceLinear
from recurl.recurrence.linear.ops import forward, map_folded, run_operator
from recurl.recurrence.linear.registry import LINEAR
from recurl.recurrence.linear.scan import ScanLinear, TracedScan
from recurl.recurrence.ops import refuse_forward_mode
from recurl.sequences.boundaries import Boundaries

__all__ = ["linear_recurrence"]


def linear_recurrence(
    a: Tensor, b: Tensor, states: Tensor, boundaries: Boundaries, recurrent_backend: str = "fastest"
) -> Tensor:
    """Solve ``h[n] = a[n] * h[n - 1] + b[n]`` over the segments of a flat stream, real or complex, elementwise.

    Where a segment starts, the state stored at that token replaces ``h[n - 1]``. It is selected, not blended in, so NaN
    and infinities of other segments, and of states that aren't read, don't propagate.

    The state is carried from token to token in float64 (float32 for bfloat16 and float16 inputs), by ``triton`` from
    one block of 16 tokens to the next. Long sequences with coefficients near one therefore keep the accuracy of their
    dtype. Results are deterministic: the same inputs give the same bits.

    Args:
        a: coefficients ``[N, *shape]``, or ``[*shape]`` if they are the same at every token.
        b: ``[N, *shape]``.
        states: stored states ``[N, *shape]``, read only at the first token of each segment.
        boundaries: the segments of the N tokens.
        recurrent_backend: ``"reference"``, ``"loop"``, ``"scan"``, ``"cpu"``, ``"triton"``, ``"auto"`` (``loop``, or
            ``scan`` under ``torch.compile``) or ``"fastest"`` (``triton`` or ``cpu`` if supported, else ``loop``).
            ``scan`` multiplies the coefficients of up to T tokens: if moduli over 1 make such a product infinite,
            states that are 0 become NaN.

    Returns:
        h, ``[N, *shape]``, differentiable in a, b and states to any order and in forward mode.

    Raises:
        ArgumentError: shapes or dtypes don't match, or there is no such backend.
        UnsupportedError: the backend can't run this call; the message states the reason.

    Example:
        >>> boundaries = Boundaries.from_is_init(torch.tensor([True, False, True, False]))
        >>> b, states = torch.ones(4, 1), torch.tensor([[8.0], [torch.nan], [2.0], [torch.nan]])
        >>> linear_recurrence(torch.tensor([0.5]), b, states, boundaries).squeeze(-1).tolist()
        [5.0, 3.5, 2.0, 2.0]
    """
    _check(a, b, states, boundaries)
    kernels = LINEAR.choose(recurrent_backend, b.device, b.dtype)
    if b.numel() == 0:
        return b.clone()
    flat = (a.reshape(*a.shape[: a.ndim - b.ndim + 1], -1), b.flatten(1), states.flatten(1))
    return _run(kernels, *flat, boundaries).reshape(b.shape)


def _check(a: Tensor, b: Tensor, states: Tensor, boundaries: Boundaries) -> None:
    if b.dtype not in ACCUMULATED or not a.dtype == b.dtype == states.dtype:
        served = ", ".join(str(dtype).removeprefix("torch.") for dtype in ACCUMULATED)
        raise ArgumentError(
            f"a, b and states of a linear recurrence must have the same dtype, one of {served}; got {a.dtype}, "
            f"{b.dtype} and {states.dtype}. Convert them, including a real coefficient of complex states."
        )
    if b.ndim < 2 or b.shape[0] != boundaries.num_tokens:
        raise ArgumentError(
            f"b must be [N, *shape] with the N={boundaries.num_tokens} tokens of the boundaries; got {tuple(b.shape)}. "
            "Flatten a batch [*B, T, *shape] into one stream."
        )
    if a.shape not in (b.shape, b.shape[1:]) or states.shape != b.shape:
        raise ArgumentError(
            f"For b of shape {tuple(b.shape)}, a must have the same shape, or {tuple(b.shape[1:])} if it is constant "
            f"over tokens, and states the same shape; got {tuple(a.shape)} and {tuple(states.shape)}. Expand them."
        )
    if not a.device == b.device == states.device == boundaries.device:
        raise ArgumentError(
            "a, b, states and boundaries must be on one device; "
            f"got {a.device}, {b.device}, {states.device} and {boundaries.device}."
        )


def _run(kernels: LinearKernels, a: Tensor, b: Tensor, states: Tensor, boundaries: Boundaries) -> Tensor:
    if isinstance(kernels, ReferenceLinear):
        if is_compiling():
            raise UnsupportedError("The backend 'reference' loops over tokens on the host; under tracing use 'auto'.")
        return forward(kernels, LinearInputs(a, b, states, boundaries))
    if not is_compiling():
        return _Recurrence.apply(kernels, boundaries, boundaries.starts, a, b, states)
    refuse_forward_mode(kernels.name)
    length = boundaries.batch_shape[-1]
    if isinstance(kernels, ScanLinear):
        wanted = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or states.requires_grad)
        if wanted:
            return TracedScan.apply(a, b, states, boundaries.starts, length)
        return kernels.forward(LinearInputs(a, b, states, boundaries))
    return run_operator(a, b, states, boundaries.starts, length, kernels.name)


class _Recurrence(torch.autograd.Function):
    """Autograd function for eager mode: (kernels, boundaries, their starts, a, b, states) -> h.

    The starts are a separate argument, so that torch.func can transform them.
    """

    @staticmethod
    def forward(
        kernels: LinearKernels, boundaries: Boundaries, starts: Tensor, a: Tensor, b: Tensor, states: Tensor
    ) -> Tensor:
        if boundaries.starts is not starts:
            boundaries = Boundaries(starts, boundaries.batch_shape[-1:])
        return forward(kernels, LinearInputs(a, b, states, boundaries))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.kernels, ctx.boundaries, *tensors = inputs
        starts, a, _, states = tensors
        ctx.save_for_backward(starts, a, states, output)
        ctx.save_for_forward(starts, a, states, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, h = _restore(ctx)
        needs: tuple[bool, bool, bool] = ctx.needs_input_grad[3:]
        if is_functorch_active() or needs_double_backward(grads):
            found = gradients(lambda reverse: _run_differentiably(ctx.kernels, reverse), inputs, h, grads[0], needs)
        else:
            found: Gradients = ctx.kernels.backward(inputs, h, grads[0], needs)
        return None, None, None, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        inputs, h = _restore(ctx)
        a, b, states = tangents[3:]
        return tangent(lambda other: _run_differentiably(ctx.kernels, other), inputs, h, (a, b, states))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        kernels, boundaries, starts, a, b, states = args

        def run(a: Tensor, b: Tensor, states: Tensor, starts: Tensor) -> Tensor:
            return _Recurrence.apply(kernels, boundaries, starts, a, b, states)

        of_starts, *dims = in_dims[2:]
        return map_folded(run, info.batch_size, (*dims, of_starts), (a, b, states, starts))


def _run_differentiably(kernels: LinearKernels, inputs: LinearInputs) -> Tensor:
    """Run the recurrence on other inputs, differentiably."""
    return _Recurrence.apply(kernels, inputs.boundaries, inputs.boundaries.starts, inputs.a, inputs.b, inputs.states)


def _restore(ctx: Any) -> tuple[LinearInputs, Tensor]:
    """Return the saved inputs, with h in place of b, and h."""
    starts, a, states, h = ctx.saved_tensors
    boundaries: Boundaries = ctx.boundaries
    if boundaries.starts is not starts:
        boundaries = Boundaries(starts, boundaries.batch_shape[-1:])
    return LinearInputs(a, h, states, boundaries), h
