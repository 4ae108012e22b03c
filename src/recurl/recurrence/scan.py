"""A scan over time that ``torch.compile`` can see into: torch's scan operator with hand-written derivatives.

A flat stream of N tokens is cut into chunks of equal size, which are worked on side by side: each takes the segments
that *start* in it, up to their ends. So the scan is as long as a chunk and the longest segment together, however many
tokens there are; both lengths are read on the host. At segment starts the stored state is loaded inside the scan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl._torch import is_exporting, scan, trace
from recurl.recurrence.backend import LayerCall, Options, Support
from recurl.recurrence.boundaries import Boundaries
from recurl.recurrence.cells import Cell, Derivatives, LayerWeights, States
from recurl.recurrence.kernel_backend import AutogradBackend
from recurl.recurrence.kernels import Gradients, Inputs, features_and_states, inputs_of
from recurl.recurrence.ops import backward_by_autograd, refuse_forward_mode

_Step = Callable[[States, Tensor], tuple[States, States]]


_STEP_COST = 8  # of a step beside the work on its rows, in rows


class ScanKernels:
    """One matrix product and a few pointwise operations per step in each direction, all else outside the scan."""

    name = "scan"
    cells = None

    def missing(self) -> str | None:
        """Nothing: it needs torch only."""
        return None

    def unsupported(self, support: Support) -> str | None:
        """It can't be exported: how long it is depends on the data."""
        return "its length depends on the data; to export use 'loop' or 'auto'" if is_exporting() else None

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
        """See :meth:`recurl.recurrence.kernels.Kernels.forward`. Saves the input product."""
        return _forward(call, _layout(call.boundaries), keep)

    def backward(
        self, call: LayerCall, after: States, saved: tuple[Tensor, ...], grads: States, needs: Inputs[bool]
    ) -> Gradients:
        """See :meth:`recurl.recurrence.kernels.Kernels.backward`."""
        derivatives = call.cell.derivatives
        if derivatives is None:
            return backward_by_autograd(self, call, grads, needs)
        return _backward(call, derivatives, _layout(call.boundaries), after, saved, grads, needs)

    def saved_like(self, call: LayerCall) -> tuple[Tensor, ...]:
        """See :meth:`recurl.recurrence.kernels.Kernels.saved_like`."""
        if call.cell.derivatives is None:
            return ()
        return (call.x.new_empty(call.x.shape[0], call.weights.w_hh.shape[0]),)

    def differentiable(self, call: LayerCall) -> States:
        """See :meth:`recurl.recurrence.kernels.Kernels.differentiable`."""
        return _forward(call, _layout(call.boundaries), keep=False)[0]


class ScanBackend(AutogradBackend):
    """The scan. In eager mode its step runs in a Python loop; ``torch.compile`` sees a scan, and fuses the rest."""

    def __init__(self) -> None:
        super().__init__(ScanKernels())

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """See :meth:`recurl.recurrence.backend.Backend.run`."""
        inputs = inputs_of(call).flat
        wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
        # Torch's own derivatives of a scan refuse steps that make views, so that a cell without derivatives by hand
        # has gradients as an operator.
        if not torch.compiler.is_compiling() or (wanted and call.cell.derivatives is None):
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
    """What ``ops`` does in eager mode, on tensors only, so that it traces."""

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
    # A compiled scan takes no tensors that share memory, as entries of a consolidated TensorDict or flat weights do.
    weights = cell.pack([None if weight is None else weight.clone() for weight in weights])
    states = tuple(state.clone() for state in given.states)
    return LayerCall(cell, weights, x, states, Boundaries(starts, (x.shape[0],)), Options())


@dataclass(frozen=True)
class _Layout:
    """Chunks side by side.

    Attributes:
        grid: int64 ``[steps, chunks]``: which token each chunk works on at each step. A chunk that is through with its
            segments runs on over tokens that are not its own, to no effect.
        place: int64 ``[N]``: where the result of each token stands in the flattened grid.
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
    """States after a step, and its outputs; ``inputs`` hold the input product if the cell is made of gates."""
    cell, w = call.cell, call.weights
    if cell.derivatives is None:
        features, states = cell.step(inputs, states, *w)
        return states, states if cell.features_are_first_state else (features, *states)
    h, *rest = cell.derivatives.step(inputs, F.linear(states[0], w.w_hh, w.b_hh), states)
    states = (h if w.w_hr is None else F.linear(h, w.w_hr), *rest)
    return states, states


def _per_row(flags: Tensor, like: Tensor) -> Tensor:
    """``[R]`` in as many dimensions as ``like``, ``[R, *shape]``."""
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
    """States before every token."""
    starts = call.boundaries.starts.unsqueeze(-1)
    return tuple(
        torch.where(starts, stored, torch.cat([state[:1], state[:-1]]))
        for stored, state in zip(call.states, after, strict=True)
    )


@torch.compiler.assume_constant_result
def _allow_scalars() -> None:
    """Where a graph may break, let ``torch.compile`` read a length from the device, for good: nothing narrower exists.

    A whole graph (``fullgraph=True``) may do so by itself. Else Dynamo would break the graph there, and torch's own
    lowering of a scan would fail.
    """
    if not trace().fake_mode.shape_env.settings.allow_scalar_outputs:
        torch.compiler.config.capture_scalar_outputs = True


@torch.compiler.assume_constant_result
def _count_reads() -> int:
    """Return how many lengths this trace has read, this one included."""
    context = trace()
    context.recurl_reads = getattr(context, "recurl_reads", 0) + 1
    return context.recurl_reads


def _layout(boundaries: Boundaries) -> _Layout:
    if torch.compiler.is_compiling():
        _allow_scalars()
    tokens, device = boundaries.num_tokens, boundaries.device
    token = torch.arange(tokens, device=device)
    longest = (token - boundaries.start_index).max() + 1
    # Chunks of C tokens make about C + longest steps of cost _STEP_COST + tokens / C: this C makes their product least.
    size = _read((longest * tokens / _STEP_COST).sqrt().ceil().long(), tokens)
    chunks = tokens // size + 2  # two at least: torch.compile makes a case of its own of 1
    chunk = boundaries.start_index // size  # of each token: that in which its segment starts; it never falls
    edges = torch.searchsorted(chunk, torch.arange(chunks + 1, device=device))
    begin = edges[:-1]
    steps = _read((edges[1:] - begin).max(), tokens)
    grid = (begin + torch.arange(steps, device=device).unsqueeze(1)).clamp(max=tokens - 1)
    # Row: how many tokens after the first of its chunk; column: the chunk.
    return _Layout(grid, (token - begin.index_select(0, chunk)) * chunks + chunk)


def _read(value: Tensor, most: int) -> int:
    """A number from 1 to ``most``, read from the device."""
    if torch.compiler.is_compiling():
        # Without effect, but it keeps the same length read twice, as by two layers, apart: torch's compiler would read
        # it once, and know tensors whose sizes follow from it by two different symbols.
        value = value.clamp(min=-_count_reads())
    number = int(value.item())
    if torch.compiler.is_compiling():
        check = cast(Any, torch)._check  # documented under this name
        check(number >= 1)
        check(number <= most)
    return number


def _run(step: _Step, states: States, layout: _Layout, reverse: bool = False) -> tuple[Tensor, ...]:
    """Scan over all steps of all chunks, carrying what ``states`` is like; return the outputs in token order."""
    grid, place = layout.grid, layout.place
    carry = tuple(state.new_zeros(grid.shape[1], *state.shape[1:]) for state in states)
    if torch.compiler.is_compiling():
        # Outputs must not share memory with what is carried.
        def apart(carry: States, token: Tensor) -> tuple[States, States]:
            carry, out = step(carry, token)
            return carry, tuple(value.clone() for value in out)

        _, outputs = scan(apart, carry, grid.flip(0) if reverse else grid)
    else:
        results: list[States] = []
        for token in reversed(grid) if reverse else grid:
            carry, out = step(carry, token)
            results.append(out)
        outputs = tuple(torch.stack(values) for values in zip(*results, strict=True))
    if reverse:
        # place is row * chunks + chunk. The last row now comes first, while chunks stay: with steps - 1 - row for row
        # that is steps * chunks - chunks - place + 2 * chunk.
        place = grid.numel() - grid.shape[1] - place + 2 * (place % grid.shape[1])
    return tuple(values.flatten(0, 1).index_select(0, place) for values in outputs)
