"""``linear_recurrence``, and the operation "linear" with its derivatives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.torch_compat import is_compiling
from recurl.recurrence.backend import LayerCall, OperatorSupport, record_run
from recurl.recurrence.built_in import LINEAR, OPERATIONS
from recurl.recurrence.cells import States
from recurl.recurrence.kernels import Gradients, Inputs
from recurl.recurrence.linear.kernels import ACCUMULATED, LinearInputs, LinearKernels, gradients, tangent
from recurl.recurrence.linear.scan import TracedScan
from recurl.recurrence.operation import Run, refuse_forward_mode, run_operation
from recurl.recurrence.operators import OperatorCell, OperatorLayer, check_types, operator_of
from recurl.sequences.index import Boundaries

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
        ArgumentTypeError: an argument isn't a tensor, or boundaries aren't :class:`Boundaries`.
        ArgumentError: shapes or dtypes don't match, or there is no such backend.
        UnsupportedError: the backend can't run this call; the message states the reason.

    Example:
        >>> from recurl.recurrence import Boundaries
        >>> boundaries = Boundaries.from_is_init(torch.tensor([True, False, True, False]))
        >>> b, states = torch.ones(4, 1), torch.tensor([[8.0], [torch.nan], [2.0], [torch.nan]])
        >>> linear_recurrence(torch.tensor([0.5]), b, states, boundaries).squeeze(-1).tolist()
        [5.0, 3.5, 2.0, 2.0]
    """
    check_types(boundaries, a=a, b=b, states=states)
    _check(a, b, states, boundaries)
    kernels = LINEAR.choose(recurrent_backend, OperatorSupport(b.device, b.dtype, is_compiling()))
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
    if kernels.name == "reference":
        if is_compiling():
            raise UnsupportedError("The backend 'reference' loops over tokens on the host; under tracing use 'auto'.")
        record_run(kernels.name)
        return kernels.forward(LinearInputs(a, b, states, boundaries))
    if kernels.name == "scan" and is_compiling():
        refuse_forward_mode(kernels.name)
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or states.requires_grad):
            return TracedScan.apply(a, b, states, boundaries.starts, boundaries.batch_shape[-1])
        return kernels.forward(LinearInputs(a, b, states, boundaries))
    return run_operation(OPERATIONS[f"linear_{kernels.name}"], layer_call(LinearInputs(a, b, states, boundaries)))[0]


class _Linear(OperatorCell, name="linear recurrence"):
    """The recurrence with coefficients per token."""

    fields, x, streams = LinearInputs._fields[:3], "b", ("states", "a")


class _Constant(_Linear, name="linear recurrence with constant coefficients"):
    """The recurrence with the same coefficients at every token."""

    parameter_names, streams = ("a",), ("states",)


_LINEAR, _CONSTANT = _Linear(), _Constant()


def layer_call(inputs: LinearInputs) -> LayerCall:
    """Return the inputs as a call of :class:`LayerKernels`."""
    return (_CONSTANT if inputs.a.ndim == 1 else _LINEAR).call(inputs[:3], inputs.boundaries)


class LayerKernels(OperatorLayer):
    """Kernels of linear recurrences in the form of an :class:`Operation`."""

    def inputs_of(self, call: LayerCall) -> LinearInputs:
        """Return the inputs of a call."""
        return LinearInputs._make((*operator_of(call).separated(call), call.boundaries))

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, States]:
        """Return h."""
        return (self.kernels.forward(self.inputs_of(call)),), ()

    def backward(self, call: LayerCall, after: States, saved: States, grads: States, needs: Inputs[bool]) -> Gradients:
        """Return the gradients."""
        cell = operator_of(call)
        return cell.arranged(self.kernels.backward(self.inputs_of(call), after[0], grads[0], cell.separated(needs)))

    def gradients(self, run: Run, call: LayerCall, after: States, grads: States, needs: Inputs[bool]) -> Gradients:
        """Return the gradients as runs of other calls."""
        cell = operator_of(call)
        return cell.arranged(gradients(_runner(run), self.inputs_of(call), after[0], grads[0], cell.separated(needs)))

    def tangent(self, run: Run, call: LayerCall, after: States, tangents: Inputs[Tensor | None]) -> States:
        """Return the tangent of h as a run of another call."""
        return (tangent(_runner(run), self.inputs_of(call), after[0], operator_of(call).separated(tangents)),)


def _runner(run: Run) -> Callable[[LinearInputs], Tensor]:
    return lambda inputs: run(layer_call(inputs))[0]
