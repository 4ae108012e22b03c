"""A step loop over length-sorted segments with hand-written derivatives: any device, no compiler.

Tokens are packed (first tokens of all segments, longest segment first, then second tokens, ...), so that step t works
on the first ``batch_sizes[t]`` rows of a contiguous block. The input product is one GEMM before the loop, the weight
gradients are one GEMM each after it, and gates are finished in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.recurrence.backend import LayerCall, Support
from recurl.recurrence.boundaries import HostPlan
from recurl.recurrence.cells import LayerWeights, States
from recurl.recurrence.derivatives import DERIVATIVES
from recurl.recurrence.ops import Gradients


class LoopKernels:
    """Step loop in ATen. Fetches the segment lengths once per batch."""

    name = "loop"

    def missing(self) -> str | None:
        """Nothing: it needs torch only."""
        return None

    def unsupported(self, support: Support) -> str | None:
        """It serves everything."""
        return None

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
        """See :meth:`recurl.recurrence.ops.Kernels.forward`. Saves the gates (and a GRU's hidden product), packed."""
        kernel, plan, w = _KERNELS[call.cell.name], call.boundaries.host(), call.weights
        gates, initial = _input_gates(kernel, call), _initial(call)
        tokens = call.x.shape[0]
        h_gates = gates.new_empty(tokens if kernel.keeps_h_gates else 0, gates.shape[1])
        packed = tuple(gates.new_empty(tokens, state.shape[1]) for state in initial)
        states, w_hh_t = initial, w.w_hh.t()
        blocks = _blocks(plan.steps, (gates, h_gates, *packed))
        for rows, (step_gates, step_h_gates, *after) in zip(plan.steps, blocks, strict=True):
            states = tuple(state[:rows] for state in states)
            _hidden_product(kernel, step_gates, step_h_gates, states[0], w_hh_t, w.b_hh)
            if w.w_hr is None:
                kernel.forward(step_gates, step_h_gates, states, tuple(after))
            else:
                unprojected = torch.empty_like(after[1])
                kernel.forward(step_gates, step_h_gates, states, (unprojected, *after[1:]))
                torch.mm(unprojected, w.w_hr.t(), out=after[0])
            states = tuple(after)
        return tuple(_unpack(state, plan) for state in packed), (gates, h_gates) if keep else ()

    def backward(
        self, call: LayerCall, after: States, saved: tuple[Tensor, ...], grads: States, needs: tuple[bool, ...]
    ) -> Gradients:
        """See :meth:`recurl.recurrence.ops.Kernels.backward`."""
        kernel, plan, w = _KERNELS[call.cell.name], call.boundaries.host(), call.weights
        derivatives, initial = DERIVATIVES[call.cell.name], _initial(call)
        after, grads = (tuple(value.index_select(0, plan.order) for value in values) for values in (after, grads))
        before = _before(initial, after, plan.steps)
        gates, h_gates = saved or _gates_again(kernel, call, before)
        coefficients = derivatives.coefficients(gates, h_gates, before, after)
        grad_gates = torch.empty_like(gates)
        carried = _sweep(kernel, plan.steps, w, coefficients, grads, initial, grad_gates)
        grad_h = grads[0]
        grad_unprojected = grad_h if w.w_hr is None else grad_h @ w.w_hr
        grad_input = derivatives.input_gradient(grad_gates, coefficients, grad_unprojected)
        return (
            _unpack(grad_input @ w.w_ih, plan) if needs[0] else None,
            grad_input.t() @ call.x.index_select(0, plan.order) if needs[1] else None,
            grad_gates.t() @ before[0] if needs[2] else None,
            grad_input.sum(0) if needs[3] else None,
            grad_gates.sum(0) if needs[4] else None,
            grad_h.t() @ derivatives.output(gates, after) if needs[5] else None,
            *(
                torch.zeros_like(state, memory_format=torch.contiguous_format).index_copy_(0, plan.starts, grad)
                if need
                else None
                for state, grad, need in zip(call.states, carried, needs[6:], strict=True)
            ),
        )

    def saved_like(self, call: LayerCall) -> tuple[Tensor, ...]:
        """See :meth:`recurl.recurrence.ops.Kernels.saved_like`."""
        tokens, rows = call.x.shape[0], call.weights.w_hh.shape[0]
        kept = tokens if _KERNELS[call.cell.name].keeps_h_gates else 0
        return call.x.new_empty(tokens, rows), call.x.new_empty(kept, rows)

    def differentiable(self, call: LayerCall) -> States:
        """See :meth:`recurl.recurrence.ops.Kernels.differentiable`."""
        plan = call.boundaries.host()
        after: list[States] = []
        states = _initial(call)
        for rows, tokens in zip(plan.steps, call.x.index_select(0, plan.order).split(plan.steps), strict=True):
            states = call.weights.step(call.cell, tokens, tuple(state[:rows] for state in states))
            after.append(states)
        packed = (torch.cat(state) for state in zip(*after, strict=True))
        return tuple(torch.empty_like(state).index_copy(0, plan.order, state) for state in packed)


@dataclass(frozen=True)
class _Kernel:
    """Pointwise work of one cell on packed rows; H units, GH gate columns, R rows of one step.

    Attributes:
        forward: ``(gates [R, GH], h_gates [R, GH], states, states after to fill)``, before projection. Finishes
            ``gates``, which hold the input product, in place. ``h_gates`` hold the hidden product if the cell keeps it
            apart; else it is already in ``gates``.
        backward: ``reverse`` of :class:`Derivatives`, given also the hidden-gate gradient to fill, and the gradients
            of the states before to fill, h's with what bypasses the hidden product only. Spoils its second argument.
        keeps_h_gates: the hidden product enters the gates other than by addition, so it is kept apart; and h reaches
            the next h otherwise than through it.
    """

    forward: Callable[[Tensor, Tensor, States, States], None]
    backward: Callable[[States, States, Tensor, States], None]
    keeps_h_gates: bool


def _lstm_forward(gates: Tensor, h_gates: Tensor, states: States, out: States) -> None:
    hidden = gates.shape[1] // 4
    gates[:, : 2 * hidden].sigmoid_()
    gates[:, 2 * hidden : 3 * hidden].tanh_()
    gates[:, 3 * hidden :].sigmoid_()
    i, f, g, o = gates.chunk(4, 1)
    h, c = out
    torch.mul(f, states[1], out=c).addcmul_(i, g)
    torch.tanh(c, out=h).mul_(o)


def _lstm_backward(coefficients: States, grads: States, out: Tensor, flows: States) -> None:
    per_gate, c_per_h, forget = coefficients
    grad_h, grad_c = grads
    hidden = grad_h.shape[1]
    grad_c.addcmul_(grad_h, c_per_h)
    by_gate = (3, hidden)
    cell_gates = per_gate[:, : 3 * hidden].unflatten(1, by_gate)
    torch.mul(cell_gates, grad_c.unsqueeze(1), out=out[:, : 3 * hidden].unflatten(1, by_gate))
    torch.mul(per_gate[:, 3 * hidden :], grad_h, out=out[:, 3 * hidden :])
    torch.mul(grad_c, forget, out=flows[1])


def _gru_forward(gates: Tensor, h_gates: Tensor, states: States, out: States) -> None:
    hidden = gates.shape[1] // 3
    gates[:, : 2 * hidden].add_(h_gates[:, : 2 * hidden]).sigmoid_()
    r, z, n = gates.chunk(3, 1)
    n.addcmul_(r, h_gates[:, 2 * hidden :]).tanh_()
    torch.lerp(n, states[0], z, out=out[0])


def _gru_backward(coefficients: States, grads: States, out: Tensor, flows: States) -> None:
    per_gate, z, _ = coefficients
    (grad_h,) = grads
    by_gate = (3, grad_h.shape[1])
    torch.mul(per_gate.unflatten(1, by_gate), grad_h.unsqueeze(1), out=out.unflatten(1, by_gate))
    torch.mul(grad_h, z, out=flows[0])


_KERNELS = {
    "lstm": _Kernel(_lstm_forward, _lstm_backward, keeps_h_gates=False),
    "gru": _Kernel(_gru_forward, _gru_backward, keeps_h_gates=True),
}


def _input_gates(kernel: _Kernel, call: LayerCall) -> Tensor:
    """Packed input product and all biases that enter the gates by addition, ``[N, GH]``."""
    w = call.weights
    bias = w.b_ih if kernel.keeps_h_gates or w.b_ih is None or w.b_hh is None else w.b_ih + w.b_hh
    return F.linear(call.x.index_select(0, call.boundaries.host().order), w.w_ih, bias)


def _initial(call: LayerCall) -> States:
    """Stored states at segment starts, longest segment first, each ``[S, ...]``."""
    starts = call.boundaries.host().starts
    return tuple(state.index_select(0, starts) for state in call.states)


def _hidden_product(
    kernel: _Kernel, gates: Tensor, h_gates: Tensor, h: Tensor, w_hh_t: Tensor, b_hh: Tensor | None
) -> None:
    """Add W_hh h to ``gates``, or for a cell that needs it apart write it to ``h_gates``, its bias included."""
    if not kernel.keeps_h_gates:
        gates.addmm_(h, w_hh_t)
    elif b_hh is None:
        torch.mm(h, w_hh_t, out=h_gates)
    else:
        torch.addmm(b_hh, h, w_hh_t, out=h_gates)


def _gates_again(kernel: _Kernel, call: LayerCall, before: States) -> tuple[Tensor, Tensor]:
    """The finished gates of all packed tokens at once, from the states before them."""
    gates = _input_gates(kernel, call)
    h_gates = torch.empty_like(gates) if kernel.keeps_h_gates else gates.new_empty(0, gates.shape[1])
    _hidden_product(kernel, gates, h_gates, before[0], call.weights.w_hh.t(), call.weights.b_hh)
    kernel.forward(gates, h_gates, before, tuple(torch.empty_like(before[-1]) for _ in before))
    return gates, h_gates


def _unpack(packed: Tensor, plan: HostPlan) -> Tensor:
    return torch.empty_like(packed).index_copy_(0, plan.order, packed)


def _sweep(
    kernel: _Kernel,
    steps: list[int],
    weights: LayerWeights,
    coefficients: States,
    grads_after: States,
    initial: States,
    grad_gates: Tensor,
) -> States:
    """Walk back over time, filling the hidden-gate gradient; return the gradients of ``initial``.

    Adds to ``grads_after`` what flows back into each token; for h that is its whole gradient.
    """
    # What flows back from the next step: zero for the rows that have no next step.
    carried = tuple(torch.zeros_like(state) for state in initial)
    count = len(coefficients)
    blocks = _blocks(steps, (grad_gates, *coefficients, *grads_after))
    for rows, (out, *block) in zip(reversed(steps), reversed(blocks), strict=True):
        flows = tuple(flow[:rows] for flow in carried)
        grad_h, *rest = (grad.add_(flow) for grad, flow in zip(block[count:], flows, strict=True))
        if weights.w_hr is not None:
            grad_h = grad_h @ weights.w_hr
        kernel.backward(tuple(block[:count]), (grad_h, *rest), out, flows)
        if kernel.keeps_h_gates:
            flows[0].addmm_(out, weights.w_hh)
        else:
            torch.mm(out, weights.w_hh, out=flows[0])
    return carried


def _blocks(steps: list[int], packed: States) -> list[States]:
    """The rows of each step, of all tensors; those without rows as they are."""
    return list(zip(*(value.split(steps) if value.shape[0] else [value] * len(steps) for value in packed), strict=True))


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
