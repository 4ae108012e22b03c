"""Scan over time that ``torch.compile`` can trace: torch's scan operator with hand-written derivatives.

A flat stream of N tokens is cut into chunks of equal size, which are processed in parallel. Each chunk handles the
segments that *start* in it, up to their ends. The length of the scan is therefore about that of one chunk plus the
longest segment, independent of N. Reading the chunk size and the number of steps synchronizes with the device. At
segment starts, the stored state is loaded inside the scan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.core.torch_compat import check, is_compiling, is_exporting, scan, trace
from recurl.recurrence.backend import LayerCall, Options, Support
from recurl.recurrence.cells import Cell, Derivatives, LayerWeights, States
from recurl.recurrence.kernel_backend import AutogradBackend, backward_by_autograd
from recurl.recurrence.kernels import Gradients, Inputs, Kernels, features_and_states
from recurl.recurrence.operation import refuse_forward_mode
from recurl.sequences.index import Boundaries

_Step = Callable[[States, Tensor], tuple[States, States]]


_STEP_COST = 8  # fixed cost of a step, in units of the cost of one row


class ScanKernels(Kernels):
    """Kernels with one matrix product and a few pointwise operations per step; all other work is outside the scan."""

    name = "scan"

    def unsupported(self, support: Support) -> str | None:
        """Return why export is unsupported, or None otherwise."""
        return "its length depends on the data; to export use 'loop' or 'auto'" if is_exporting() else None

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
        """Run the forward pass. Saves the input product."""
        return _forward(call, _layout(call.boundaries), keep)

    def backward(
        self, call: LayerCall, after: States, saved: tuple[Tensor, ...], grads: States, needs: Inputs[bool]
    ) -> Gradients:
        """Return the gradients of the call's inputs."""
        derivatives = call.cell.derivatives
        if derivatives is None:
            return backward_by_autograd(self, call, grads, needs)
        return _backward(call, derivatives, _layout(call.boundaries), after, saved, grads, needs)

    def saved_like(self, call: LayerCall) -> tuple[Tensor, ...]:
        """Return empty tensors like those that :meth:`forward` saves."""
        if call.cell.derivatives is None:
            return ()
        return (call.x.new_empty(call.x.shape[0], call.weights.w_hh.shape[0]),)

    def differentiable(self, call: LayerCall) -> States:
        """Return the outputs through differentiable operations of torch."""
        return _forward(call, _layout(call.boundaries), keep=False)[0]


class ScanBackend(AutogradBackend):
    """Scan backend: a Python loop over steps in eager mode, torch's scan operator under ``torch.compile``."""

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Run the layer."""
        inputs = call.inputs
        wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
        # torch's own derivatives of a scan reject steps that create views, so a cell without hand-written derivatives
        # runs as an operator when gradients are needed.
        if not is_compiling() or (wanted and call.cell.derivatives is None):
            return super().run(call)
        refuse_forward_mode(self.name)
        layout, starts = _layout(call.boundaries), call.boundaries.starts
        if call.cell.derivatives is None:
            outputs, _ = _forward(_call(call.cell, starts, inputs), layout, keep=False)
        else:
            outputs: States = _Traced.apply(
                call.cell, call.options.recompute, starts, layout.grid, layout.place, *inputs
            )
        return features_and_states(call.cell, outputs)


class _Traced(torch.autograd.Function):
    """Traceable counterpart of the eager autograd function, whose arguments are tensors rather than a call."""

    @staticmethod
    def forward(
        ctx: Any, cell: Cell, recompute: bool, starts: Tensor, grid: Tensor, place: Tensor, *inputs: Tensor | None
    ) -> States:
        after, saved = _forward(_call(cell, starts, inputs), _Layout(grid, place), keep=not recompute)
        ctx.cell, ctx.count = cell, len(inputs)
        ctx.save_for_backward(starts, grid, place, *inputs, *after, *saved)
        return after

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        starts, grid, place, *rest = ctx.saved_tensors
        inputs, kept = tuple(rest[: ctx.count]), tuple(rest[ctx.count :])
        after, saved = kept[: len(grads)], kept[len(grads) :]
        call, needs = _call(ctx.cell, starts, inputs), Inputs.from_flat(ctx.cell, ctx.needs_input_grad[5:])
        gradients = _backward(call, ctx.cell.derivatives, _Layout(grid, place), after, saved, grads, needs)
        return None, None, None, None, None, *gradients.flat


def _call(cell: Cell, starts: Tensor, inputs: tuple[Tensor | None, ...]) -> LayerCall:
    given: Inputs[Any] = Inputs.from_flat(cell, inputs)
    x, weights = given.x, given.weights
    # A compiled scan doesn't accept tensors that share memory, as consolidated TensorDict entries or flat weights do.
    weights = cell.pack([None if weight is None else weight.clone() for weight in weights])
    states = tuple(state.clone() for state in given.states)
    return LayerCall(cell, weights, x, states, Boundaries(starts, (x.shape[0],)), Options())


@dataclass(frozen=True)
class _Layout:
    """Schedule of the chunks that are processed in parallel.

    Attributes:
        grid: int64 ``[steps, chunks]``: the token that each chunk processes at each step. A chunk that has finished
            its segments continues over tokens of other chunks, whose results are discarded.
        place: int64 ``[N]``: position of each token's result in the flattened grid.
    """

    grid: Tensor
    place: Tensor


def _forward(call: LayerCall, layout: _Layout, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
    cell, w, starts, stored = call.cell, call.weights, call.boundaries.starts, call.states
    inputs = call.x if cell.derivatives is None else F.linear(call.x, w.w_ih, w.b_ih)

    def step(states: States, token: Tensor) -> tuple[States, States]:
        begins = starts.index_select(0, token)
        pairs = zip(stored, states, strict=True)
        states = tuple(
            torch.where(_per_row(begins, state), first.index_select(0, token), state) for first, state in pairs
        )
        return _advance(call, inputs.index_select(0, token), states)

    outputs = _run(step, call.states, layout)
    return outputs, (inputs,) if keep and cell.derivatives is not None else ()


def _advance(call: LayerCall, inputs: Tensor, states: States) -> tuple[States, States]:
    """Return the states after a step and its outputs; ``inputs`` hold the input product if the cell has gates."""
    cell, w = call.cell, call.weights
    if cell.derivatives is None:
        features, states = cell.step(inputs, states, *w)
        return states, states if cell.features_are_first_state else (features, *states)
    h, *rest = cell.derivatives.step(inputs, F.linear(states[0], w.w_hh, w.b_hh), states)
    states = (h if w.w_hr is None else F.linear(h, w.w_hr), *rest)
    return states, states


def _per_row(flags: Tensor, like: Tensor) -> Tensor:
    """Reshape flags ``[R]`` to broadcast against ``like``, ``[R, *shape]``."""
    return flags.reshape(-1, *(1,) * (like.ndim - 1))


def _backward(
    call: LayerCall,
    cell: Derivatives,
    layout: _Layout,
    after: States,
    saved: tuple[Tensor, ...],
    grads: States,
    needs: Inputs[bool],
) -> Gradients:
    w, starts, ends = call.weights, call.boundaries.starts, call.boundaries.ends
    before = _before(call, after)
    x_gates = saved[0] if saved else F.linear(call.x, w.w_ih, w.b_ih)
    h_gates = F.linear(before[0], w.w_hh, w.b_hh)
    gates = cell.finish(x_gates, h_gates)
    coefficients = cell.coefficients(gates, h_gates, before, after)

    def step(carried: States, token: Tensor) -> tuple[States, States]:
        last = ends.index_select(0, token).unsqueeze(-1)
        pairs = zip(grads, carried, strict=True)
        grad_h, *rest = (grad.index_select(0, token) + torch.where(last, 0, flow) for grad, flow in pairs)
        unprojected = grad_h if w.w_hr is None else grad_h @ w.w_hr
        local = tuple(coefficient.index_select(0, token) for coefficient in coefficients)
        grad_gates, direct, before = cell.reverse(local, (unprojected, *rest))
        through = grad_gates @ w.w_hh
        return (through if direct is None else through + direct, *before), (grad_h, *rest)

    grad_h, *rest = _run(step, call.states, layout, reverse=True)
    unprojected = grad_h if w.w_hr is None else grad_h @ w.w_hr
    grad_gates, direct, rest = cell.reverse(coefficients, (unprojected, *rest))
    grad_input = cell.input_gradient(grad_gates, coefficients, unprojected)
    flows: tuple[Tensor | None, ...] = (None, *rest)
    if needs.states[0]:
        through = grad_gates @ w.w_hh
        flows = (through if direct is None else through + direct, *rest)
    wanted: LayerWeights = needs.weights
    return Inputs(
        grad_input @ w.w_ih if needs.x else None,
        call.cell.pack(
            [
                grad_input.t() @ call.x if wanted.w_ih else None,
                grad_gates.t() @ before[0] if wanted.w_hh else None,
                grad_input.sum(0) if wanted.b_ih else None,
                grad_gates.sum(0) if wanted.b_hh else None,
                grad_h.t() @ cell.output(gates, after) if wanted.w_hr else None,
            ]
        ),
        tuple(
            torch.where(starts.unsqueeze(-1), flow, 0) if need and flow is not None else None
            for flow, need in zip(flows, needs.states, strict=True)
        ),
    )


def _before(call: LayerCall, after: States) -> States:
    """Return the states before every token."""
    starts = call.boundaries.starts.unsqueeze(-1)
    return tuple(
        torch.where(starts, stored, torch.cat([state[:1], state[:-1]]))
        for stored, state in zip(call.states, after, strict=True)
    )


@torch.compiler.assume_constant_result
def _allow_scalars() -> None:
    """Permanently allow ``torch.compile`` to read scalars from the device; torch has no narrower setting.

    With ``fullgraph=True``, reading scalars is allowed already. Otherwise Dynamo would break the graph at the read, and
    torch's lowering of the scan would fail.
    """
    if not trace().fake_mode.shape_env.settings.allow_scalar_outputs:
        torch.compiler.config.capture_scalar_outputs = True


@torch.compiler.assume_constant_result
def _count_reads() -> int:
    """Return the number of lengths that the current trace has read, including this one."""
    context = trace()
    context.recurl_reads = getattr(context, "recurl_reads", 0) + 1
    return context.recurl_reads


def _layout(boundaries: Boundaries) -> _Layout:
    if is_compiling():
        _allow_scalars()
    tokens, device = boundaries.num_tokens, boundaries.device
    token = torch.arange(tokens, device=device)
    longest = (token - boundaries.start_index).max() + 1
    # Chunks of C tokens take about C + longest steps, each of cost _STEP_COST + tokens / C. This C minimizes the total.
    size = _read((longest * tokens / _STEP_COST).sqrt().ceil().long(), tokens)
    chunks = tokens // size + 2  # at least two, since torch.compile specializes on 1
    chunk = boundaries.start_index // size  # per token, the chunk in which its segment starts; non-decreasing
    edges = torch.searchsorted(chunk, torch.arange(chunks + 1, device=device))
    begin = edges[:-1]
    steps = _read((edges[1:] - begin).max(), tokens)
    grid = (begin + torch.arange(steps, device=device).unsqueeze(1)).clamp(max=tokens - 1)
    # Row: offset of the token from the first one of its chunk. Column: the chunk.
    return _Layout(grid, (token - begin.index_select(0, chunk)) * chunks + chunk)


def _read(value: Tensor, most: int) -> int:
    """Read an integer from 1 to ``most`` from the device; ``most`` on ``meta``, where there is nothing to read."""
    if is_compiling():
        # This clamp doesn't change the value. It keeps two reads of the same length, as by two layers, distinct:
        # torch.compile would merge them into one read but use two symbols for the sizes that depend on it.
        value = value.clamp(min=-_count_reads())
    number = most if value.is_meta else int(value.item())
    if is_compiling():
        check(number >= 1)
        check(number <= most)
    return number


def _run(step: _Step, states: States, layout: _Layout, reverse: bool = False) -> tuple[Tensor, ...]:
    """Scan over all steps of all chunks with a carry shaped like ``states``; return the outputs in token order."""
    grid, place = layout.grid, layout.place
    carry = tuple(state.new_zeros(grid.shape[1], *state.shape[1:]) for state in states)
    if is_compiling():
        # Outputs must not share memory with the carry.
        def unaliased(carry: States, token: Tensor) -> tuple[States, States]:
            carry, out = step(carry, token)
            return carry, tuple(value.clone() for value in out)

        _, outputs = scan(unaliased, carry, grid.flip(0) if reverse else grid)
    else:
        results: list[States] = []
        for token in reversed(grid) if reverse else grid:
            carry, out = step(carry, token)
            results.append(out)
        outputs = tuple(torch.stack(values) for values in zip(*results, strict=True))
    if reverse:
        # place is row * chunks + chunk. Rows are now in reverse order, so row becomes steps - 1 - row and place
        # becomes steps * chunks - chunks - place + 2 * chunk.
        place = grid.numel() - grid.shape[1] - place + 2 * (place % grid.shape[1])
    return tuple(values.flatten(0, 1).index_select(0, place) for values in outputs)
