"""A step loop over length-sorted segments with hand-written derivatives: any device, no compiler.

Tokens are packed (first tokens of all segments, longest segment first, then second tokens, ...), so that step t works
on the first ``batch_sizes[t]`` rows of a contiguous block. The input product is one GEMM before the loop, the weight
gradients are one GEMM each after it, and gates are finished in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.recurrence.backend import LayerCall, Support, record_run
from recurl.recurrence.cells import Cell, LayerWeights, States


class LoopBackend:
    """Step loop in ATen with manual autograd. Fetches the segment lengths once per batch."""

    name = "loop"

    def unsupported(self, support: Support) -> str | None:
        """It reads segment lengths on the host, which can't be traced."""
        return "it reads segment lengths on the host, which can't be traced" if support.compiling else None

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """See :meth:`recurl.recurrence.backend.Backend.run`."""
        plan = call.boundaries.host()
        x = call.x.index_select(0, plan.order)
        initial = tuple(state.index_select(0, plan.starts) for state in call.states)
        w = call.weights
        after: States = _Recurrence.apply(call.cell, plan.steps, x, w.w_ih, w.w_hh, w.b_ih, w.b_hh, w.w_hr, *initial)
        record_run(self.name)
        dense = tuple(torch.empty_like(state).index_copy(0, plan.order, state) for state in after)
        return dense[0], dense


@dataclass(frozen=True)
class _Kernel:
    """Pointwise work of one cell on packed rows; H units, GH gate columns, R rows of one step.

    Attributes:
        forward: ``(gates [R, GH], h_gates [R, GH] or None, states) -> states after`` (before projection). Finishes
            ``gates``, which hold the input product, in place. Without ``h_gates`` the hidden product is already in.
        coefficients: ``(gates, h_gates, states before, states after)``, all packed tokens at once -> what
            ``backward`` needs: the derivatives that don't depend on the incoming gradient.
        backward: ``(coefficients, grads of the states after, hidden-gate gradient to fill) -> (part of h's gradient
            that bypasses the hidden product or None, gradients of the other states before)``.
        input_gradient: ``(hidden-gate gradient, coefficients, gradient of h)``, all tokens -> input-gate gradient.
        keeps_h_gates: the hidden product enters the gates other than by addition, so it is kept apart.
    """

    forward: Callable[[Tensor, Tensor | None, States], States]
    coefficients: Callable[[Tensor, Tensor, States, States], States]
    backward: Callable[[States, States, Tensor], tuple[Tensor | None, States]]
    input_gradient: Callable[[Tensor, States, Tensor], Tensor]
    keeps_h_gates: bool


def _lstm_forward(gates: Tensor, h_gates: Tensor | None, states: States) -> States:
    hidden = gates.shape[1] // 4
    gates[:, : 2 * hidden].sigmoid_()
    gates[:, 2 * hidden : 3 * hidden].tanh_()
    gates[:, 3 * hidden :].sigmoid_()
    i, f, g, o = gates.chunk(4, 1)
    c = torch.addcmul(f * states[1], i, g)
    return o * c.tanh(), c


def _lstm_coefficients(gates: Tensor, h_gates: Tensor, before: States, after: States) -> States:
    i, f, g, o = gates.chunk(4, 1)
    tanh_c = after[1].tanh()
    per_gate = torch.cat([g * i * (1 - i), before[1] * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)], 1)
    return per_gate, o * (1 - tanh_c * tanh_c), f


def _lstm_backward(coefficients: States, grads: States, out: Tensor) -> tuple[Tensor | None, States]:
    per_gate, c_per_h, forget = coefficients
    grad_h, grad_c = grads
    hidden = grad_h.shape[1]
    grad_c = torch.addcmul(grad_c, grad_h, c_per_h)
    by_gate = (3, hidden)
    cell_gates = per_gate[:, : 3 * hidden].unflatten(1, by_gate)
    torch.mul(cell_gates, grad_c.unsqueeze(1), out=out[:, : 3 * hidden].unflatten(1, by_gate))
    torch.mul(per_gate[:, 3 * hidden :], grad_h, out=out[:, 3 * hidden :])
    return None, (grad_c * forget,)


def _lstm_input_gradient(h_gradient: Tensor, coefficients: States, grad_h: Tensor) -> Tensor:
    return h_gradient


def _gru_forward(gates: Tensor, h_gates: Tensor | None, states: States) -> States:
    assert h_gates is not None
    hidden = gates.shape[1] // 3
    gates[:, : 2 * hidden].add_(h_gates[:, : 2 * hidden]).sigmoid_()
    r, z, n = gates.chunk(3, 1)
    n.addcmul_(r, h_gates[:, 2 * hidden :]).tanh_()
    return (torch.lerp(n, states[0], z),)


def _gru_coefficients(gates: Tensor, h_gates: Tensor, before: States, after: States) -> States:
    r, z, n = gates.chunk(3, 1)
    h_n = h_gates[:, 2 * gates.shape[1] // 3 :]
    by_n = (1 - z) * (1 - n * n)
    per_gate = torch.cat([by_n * h_n * r * (1 - r), (before[0] - n) * z * (1 - z), by_n * r], 1)
    return per_gate, z, by_n


def _gru_backward(coefficients: States, grads: States, out: Tensor) -> tuple[Tensor | None, States]:
    per_gate, z, _ = coefficients
    (grad_h,) = grads
    by_gate = (3, grad_h.shape[1])
    torch.mul(per_gate.unflatten(1, by_gate), grad_h.unsqueeze(1), out=out.unflatten(1, by_gate))
    return grad_h * z, ()


def _gru_input_gradient(h_gradient: Tensor, coefficients: States, grad_h: Tensor) -> Tensor:
    two = 2 * grad_h.shape[1]
    return torch.cat([h_gradient[:, :two], grad_h * coefficients[2]], 1)


_KERNELS = {
    "lstm": _Kernel(_lstm_forward, _lstm_coefficients, _lstm_backward, _lstm_input_gradient, keeps_h_gates=False),
    "gru": _Kernel(_gru_forward, _gru_coefficients, _gru_backward, _gru_input_gradient, keeps_h_gates=True),
}


class _Recurrence(torch.autograd.Function):
    """Packed x ``[N, I]``, weights and states at segment starts ``[S, ...]`` -> packed states after every token."""

    @staticmethod
    def forward(
        ctx: Any,
        cell: Cell,
        steps: list[int],
        x: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        w_hr: Tensor | None,
        *initial: Tensor,
    ) -> States:
        kernel = _KERNELS[cell.name]
        bias = b_ih if kernel.keeps_h_gates or b_ih is None or b_hh is None else b_ih + b_hh
        gates = F.linear(x, w_ih, bias)
        tokens = x.shape[0]
        kept_gates = gates.new_empty(tokens if kernel.keeps_h_gates else 0, gates.shape[1])
        after = tuple(gates.new_empty(tokens, state.shape[1]) for state in initial)
        unprojected = after[0] if w_hr is None else gates.new_empty(tokens, w_hr.shape[1])
        states, w_hh_t, begin = initial, w_hh.t(), 0
        for rows in steps:
            block = slice(begin, begin + rows)
            states = tuple(state[:rows] for state in states)
            h_gates = None
            if not kernel.keeps_h_gates:
                gates[block].addmm_(states[0], w_hh_t)
            elif b_hh is None:
                h_gates = torch.mm(states[0], w_hh_t, out=kept_gates[block])
            else:
                h_gates = torch.addmm(b_hh, states[0], w_hh_t, out=kept_gates[block])
            h, *rest = kernel.forward(gates[block], h_gates, states)
            if w_hr is not None:
                unprojected[block] = h
                h = h @ w_hr.t()
            states = (h, *rest)
            for kept, state in zip(after, states, strict=True):
                kept[block] = state
            begin += rows
        ctx.cell, ctx.steps = cell, steps
        ctx.save_for_backward(x, w_ih, w_hh, b_ih, b_hh, w_hr, gates, kept_gates, unprojected, *initial, *after)
        return after

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, w_ih, w_hh, b_ih, b_hh, w_hr, gates, kept_gates, unprojected, *states = ctx.saved_tensors
        count = len(states) // 2
        initial, after = tuple(states[:count]), tuple(states[count:])
        weights = LayerWeights(w_ih, w_hh, b_ih, b_hh, w_hr)
        if torch.is_grad_enabled():  # the caller wants to differentiate these gradients again
            return None, None, *_differentiable(ctx.cell, ctx.steps, x, weights, initial, grad_outputs)
        kernel = _KERNELS[ctx.cell.name]
        before = _before(initial, after, ctx.steps)
        coefficients = kernel.coefficients(gates, kept_gates, before, after)
        grad_gates = torch.empty_like(gates)
        grad_h, carried = _sweep(kernel, ctx.steps, weights, coefficients, grad_outputs, initial, grad_gates)
        grad_unprojected = grad_h if w_hr is None else grad_h @ w_hr
        grad_input = kernel.input_gradient(grad_gates, coefficients, grad_unprojected)
        needs = ctx.needs_input_grad
        return (
            None,
            None,
            grad_input @ w_ih if needs[2] else None,
            grad_input.t() @ x if needs[3] else None,
            grad_gates.t() @ before[0] if needs[4] else None,
            grad_input.sum(0) if needs[5] else None,
            grad_gates.sum(0) if needs[6] else None,
            grad_h.t() @ unprojected if needs[7] else None,
            *carried,
        )


def _sweep(
    kernel: _Kernel,
    steps: list[int],
    weights: LayerWeights,
    coefficients: States,
    grads_after: States,
    initial: States,
    grad_gates: Tensor,
) -> tuple[Tensor, States]:
    """Walk back over time, filling the hidden-gate gradient; return h's gradient per token and those of ``initial``."""
    grad_h = torch.empty_like(grads_after[0])
    # What flows back from the next step: zero for the rows that have no next step.
    carried = tuple(torch.zeros_like(state) for state in initial)
    end = grad_gates.shape[0]
    for rows in reversed(steps):
        block = slice(end - rows, end)
        grads = [torch.add(flow[:rows], grad[block]) for flow, grad in zip(carried, grads_after, strict=True)]
        grad_h[block] = grads[0]
        if weights.w_hr is not None:
            grads[0] = grads[0] @ weights.w_hr
        direct, rest = kernel.backward(tuple(c[block] for c in coefficients), tuple(grads), grad_gates[block])
        if direct is None:
            torch.mm(grad_gates[block], weights.w_hh, out=carried[0][:rows])
        else:
            torch.addmm(direct, grad_gates[block], weights.w_hh, out=carried[0][:rows])
        for flow, grad in zip(carried[1:], rest, strict=True):
            flow[:rows] = grad
        end -= rows
    return grad_h, carried


def _before(initial: States, after: States, steps: list[int]) -> States:
    """States before every packed token: the initial ones, then those after the previous step."""
    pieces: list[slice] = []
    begin = 0
    for rows, following in pairwise(steps):
        pieces.append(slice(begin, begin + following))
        begin += rows
    return tuple(
        torch.cat([start, *(state[piece] for piece in pieces)]) for start, state in zip(initial, after, strict=True)
    )


def _differentiable(
    cell: Cell, steps: list[int], x: Tensor, weights: LayerWeights, initial: States, grad_outputs: States
) -> tuple[Tensor | None, ...]:
    """Gradients of x, the weights and the initial states, themselves differentiable: the loop again, in autograd."""
    inputs = (x, weights.w_ih, weights.w_hh, weights.b_ih, weights.b_hh, weights.w_hr, *initial)
    after: list[States] = []
    states = initial
    for rows, tokens in zip(steps, x.split(steps), strict=True):
        states = weights.step(cell, tokens, tuple(state[:rows] for state in states))
        after.append(states)
    outputs = [torch.cat(state) for state in zip(*after, strict=True)]
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, grad_outputs, create_graph=True, allow_unused=True))
    return tuple(next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs)
