"""The step-by-step backends ``loop`` and ``reference``."""

from __future__ import annotations

import torch
from torch import Tensor

from recurl.recurrence.cells import ONE_STEP, States
from recurl.recurrence.matrix.kernels import COMPUTED, MatrixInputs, MatrixKernels
from recurl.sequences.stored import stored_at


class ReferenceMatrix(MatrixKernels):
    """Reference kernels: one token after another, in float64."""

    name = "reference"

    def forward(self, inputs: MatrixInputs, keep: bool) -> tuple[States, States]:
        """Return the results, and the states at the ends of segments."""
        query, key, value, log_decay, rate, stored, boundaries, delta, after = inputs
        streams = [stream.double().split(1) for stream in (query, key, value, log_decay, rate)]
        zero = value.new_zeros(1, *query.shape[1:], value.shape[-1], dtype=torch.float64)
        results: list[Tensor] = []
        states: list[Tensor] = []
        state = zero
        for n, (starts, ends) in enumerate(zip(boundaries.starts.tolist(), boundaries.ends.tolist(), strict=True)):
            if starts:
                at = torch.tensor([n], device=value.device)
                state = zero if stored is None else stored_at(stored, at, boundaries.num_tokens).double()
            q, k, v, a, b = (stream[n] for stream in streams)
            result, state = ONE_STEP.remember(q, k, v, a, b, state, delta)
            results.append(result)
            states.append(state if ends else zero)
        found = (torch.cat(results).to(value.dtype), torch.cat(states).to(COMPUTED[value.dtype]))
        return found if after else found[:1], ()


class LoopMatrix(MatrixKernels):
    """Step loop over all segments at once, longest first. Segment lengths are fetched once per batch."""

    name = "loop"

    def forward(self, inputs: MatrixInputs, keep: bool) -> tuple[States, States]:
        """Return the results, and the states at the ends of segments."""
        query, key, value, log_decay, rate, stored, boundaries, delta, after = inputs
        plan, wide = boundaries.host(), COMPUTED[value.dtype]
        packed = [part.index_select(0, plan.order).to(wide) for part in (query, key, value, log_decay, rate)]
        shape = (plan.starts.shape[0], *query.shape[1:], value.shape[-1])
        state = value.new_zeros(shape, dtype=wide)
        if stored is not None:
            state = stored_at(stored, plan.starts, boundaries.num_tokens)
        results: list[Tensor] = []
        finished: list[Tensor] = []  # states of segments that have ended, shortest first
        for step in zip(*(part.split(plan.steps) for part in packed), strict=True):
            rows = step[0].shape[0]
            finished.append(state[rows:].flip(0))
            q, k, v, a, b = step
            result, state = ONE_STEP.remember(q, k, v, a, b, state[:rows], delta)
            results.append(result)
        order = torch.empty_like(plan.order)
        order[plan.order] = torch.arange(order.shape[0], device=order.device)
        result = torch.cat(results).to(value.dtype).index_select(0, order)
        if not after:
            return (result,), ()
        states = torch.cat([*finished, state.flip(0)]).flip(0)
        return (result, states.new_zeros(query.shape[0], *states.shape[1:]).index_copy(0, plan.ends, states)), ()
