"""Step loop over length-sorted segments with hand-written derivatives, for any device and without a compiler.

Tokens are packed (first tokens of all segments, longest segment first, then second tokens, ...), so that step t works
on the first ``batch_sizes[t]`` rows of a contiguous block. The input product is one GEMM before the loop, each weight
gradient is one GEMM after it, and gates are computed in place.

A CUDA graph can't read the lengths of segments: there, cells without hand-written derivatives step through the rows of
the batch, and load the stored states where segments start.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.recurrence.backend import LayerCall
from recurl.recurrence.cells import LayerWeights, LoopKernel, States
from recurl.recurrence.kernel_backend import backward_by_autograd
from recurl.recurrence.kernels import Gradients, Inputs, Kernels
from recurl.sequences.index import HostPlan, is_captured


class LoopKernels(Kernels):
    """Kernels that loop over steps in ATen. Segment lengths are fetched once per batch."""

    name = "loop"

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
        """Run the forward pass. Saves gates and hidden product, packed."""
        kernel, w = call.cell.loop, call.weights
        if kernel is None:
            return self.differentiable(call), ()
        plan = call.boundaries.host()
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
        self, call: LayerCall, after: States, saved: tuple[Tensor, ...], grads: States, needs: Inputs[bool]
    ) -> Gradients:
        """Return the gradients of the call's inputs."""
        kernel, derivatives = call.cell.loop, call.cell.derivatives
        if kernel is None or derivatives is None:
            if not is_captured(call.boundaries.starts):
                call.boundaries.host()  # kept, as it isn't where functions are transformed
            return backward_by_autograd(self, call, grads, needs)
        plan, w = call.boundaries.host(), call.weights
        initial = _initial(call)
        after, grads = (tuple(value.index_select(0, plan.order) for value in values) for values in (after, grads))
        before = _before(initial, after, plan.steps)
        gates, h_gates = saved or _recompute_gates(kernel, call, before)
        coefficients = derivatives.coefficients(gates, h_gates, before, after)
        grad_gates = torch.empty_like(gates)
        carried = _backpropagate(kernel, plan.steps, w, coefficients, grads, initial, grad_gates)
        grad_h = grads[0]
        grad_unprojected = grad_h if w.w_hr is None else grad_h @ w.w_hr
        grad_input = derivatives.input_gradient(grad_gates, coefficients, grad_unprojected)
        wanted: LayerWeights = needs.weights
        return Inputs(
            _unpack(grad_input @ w.w_ih, plan) if needs.x else None,
            call.cell.pack(
                [
                    grad_input.t() @ call.x.index_select(0, plan.order) if wanted.w_ih else None,
                    grad_gates.t() @ before[0] if wanted.w_hh else None,
                    grad_input.sum(0) if wanted.b_ih else None,
                    grad_gates.sum(0) if wanted.b_hh else None,
                    grad_h.t() @ derivatives.output(gates, after) if wanted.w_hr else None,
                ]
            ),
            tuple(
                torch.zeros_like(state, memory_format=torch.contiguous_format).index_copy_(0, plan.starts, grad)
                if need
                else None
                for state, grad, need in zip(call.states, carried, needs.states, strict=True)
            ),
        )

    def saved_like(self, call: LayerCall) -> tuple[Tensor, ...]:
        """Return empty tensors like those that :meth:`forward` saves."""
        if call.cell.loop is None:
            return ()
        tokens, rows = call.x.shape[0], call.weights.w_hh.shape[0]
        kept = tokens if call.cell.loop.keeps_h_gates else 0
        return call.x.new_empty(tokens, rows), call.x.new_empty(kept, rows)

    def differentiable(self, call: LayerCall) -> States:
        """Return the outputs through differentiable operations of torch."""
        if is_captured(call.boundaries.starts):
            return _by_rows(call)
        plan = call.boundaries.host()
        cell = call.cell
        outputs: list[States] = []
        states = _initial(call)
        for rows, tokens in zip(plan.steps, call.x.index_select(0, plan.order).split(plan.steps), strict=True):
            features, states = cell.step(tokens, tuple(state[:rows] for state in states), *call.weights)
            outputs.append(states if cell.features_are_first_state else (features, *states))
        packed = (torch.cat(state) for state in zip(*outputs, strict=True))
        return tuple(torch.empty_like(state).index_copy(0, plan.order, state) for state in packed)


def _by_rows(call: LayerCall) -> States:
    """Return the outputs without reading where segments start: every row of the batch takes every step."""
    length, cell = call.boundaries.batch_shape[-1], call.cell
    starts, x, *stored = (
        value.unflatten(0, (-1, length)).unbind(1) for value in (call.boundaries.starts, call.x, *call.states)
    )
    outputs: list[States] = []
    states = tuple(state[0] for state in stored)
    for t, (first, tokens) in enumerate(zip(starts, x, strict=True)):
        states = tuple(
            torch.where(first.view(-1, *(1,) * (state.ndim - 1)), given[t], state)
            for given, state in zip(stored, states, strict=True)
        )
        features, states = cell.step(tokens, states, *call.weights)
        outputs.append(states if cell.features_are_first_state else (features, *states))
    return tuple(torch.stack(values, 1).flatten(0, 1) for values in zip(*outputs, strict=True))


def _input_gates(kernel: LoopKernel, call: LayerCall) -> Tensor:
    """Return the packed input product plus all biases that are added to the gates, ``[N, GH]``."""
    w = call.weights
    bias = w.b_ih if kernel.keeps_h_gates or w.b_ih is None or w.b_hh is None else w.b_ih + w.b_hh
    return F.linear(call.x.index_select(0, call.boundaries.host().order), w.w_ih, bias)


def _initial(call: LayerCall) -> States:
    """Return the stored states at segment starts, longest segment first, each ``[S, *shape]``."""
    starts = call.boundaries.host().starts
    return tuple(state.index_select(0, starts) for state in call.states)


def _hidden_product(
    kernel: LoopKernel, gates: Tensor, h_gates: Tensor, h: Tensor, w_hh_t: Tensor, b_hh: Tensor | None
) -> None:
    """Add W_hh h to ``gates``, or write it with its bias to ``h_gates`` for a cell that keeps it separate."""
    if not kernel.keeps_h_gates:
        gates.addmm_(h, w_hh_t)
    elif b_hh is None:
        torch.mm(h, w_hh_t, out=h_gates)
    else:
        torch.addmm(b_hh, h, w_hh_t, out=h_gates)


def _recompute_gates(kernel: LoopKernel, call: LayerCall, before: States) -> tuple[Tensor, Tensor]:
    """Recompute the gates of all packed tokens at once from the states before them."""
    gates = _input_gates(kernel, call)
    h_gates = torch.empty_like(gates) if kernel.keeps_h_gates else gates.new_empty(0, gates.shape[1])
    _hidden_product(kernel, gates, h_gates, before[0], call.weights.w_hh.t(), call.weights.b_hh)
    kernel.forward(gates, h_gates, before, tuple(torch.empty_like(before[-1]) for _ in before))
    return gates, h_gates


def _unpack(packed: Tensor, plan: HostPlan) -> Tensor:
    return torch.empty_like(packed).index_copy_(0, plan.order, packed)


def _backpropagate(
    kernel: LoopKernel,
    steps: list[int],
    weights: LayerWeights,
    coefficients: States,
    grads_after: States,
    initial: States,
    grad_gates: Tensor,
) -> States:
    """Backpropagate through time: fill the hidden-gate gradients and return the gradients of ``initial``.

    Adds the gradient from the next step to ``grads_after``, which for h yields its total gradient.
    """
    # Gradients from the next step; zero for rows without a next step.
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
    """Split all tensors into the rows of each step; a tensor without rows is repeated."""
    return list(zip(*(value.split(steps) if value.shape[0] else [value] * len(steps) for value in packed), strict=True))


def _before(initial: States, after: States, steps: list[int]) -> States:
    """Return the states before every packed token: the initial states, then those after the previous step."""
    pieces: list[slice] = []
    begin = 0
    for rows, following in pairwise(steps):
        pieces.append(slice(begin, begin + following))
        begin += rows
    return tuple(
        torch.cat([start, *(state[piece] for piece in pieces)]) for start, state in zip(initial, after, strict=True)
    )
