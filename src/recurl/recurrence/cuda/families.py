"""Forward and backward pass of the families for sm_90, on tensors. Imported only if Triton is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from recurl.recurrence.cells import States
from recurl.recurrence.cuda.family import CudaFamily, Direction, Family
from recurl.recurrence.cuda.launch import groups_for, processors_of, slot_bounds
from recurl.recurrence.cuda.plan import LayerPlan
from recurl.sequences.index import Boundaries


def run_forward(
    input_gates: Tensor, b_hn: Tensor, w_hh: Tensor, stored: States, boundaries: Boundaries, plan: LayerPlan, keep: bool
) -> tuple[States, Tensor]:
    """Run the forward pass: return states after every token and, with ``keep``, the gates."""
    tokens, device, layout, precision = input_gates.shape[0], input_gates.device, plan.layout, plan.precision
    family, groups, launch = _launch(plan, "forward", processors_of(device), tokens, keep)
    after = tuple([torch.empty(tokens, layout.hidden, dtype=torch.float32, device=device) for _ in stored])
    gates = torch.empty(tokens if keep else 0, 4 * layout.width, dtype=precision.kept, device=device)
    launch(
        *(input_gates, b_hn, family.weights("forward", w_hh, layout, precision)),
        *(stored[0], *stored[0].stride(), stored[-1], *stored[-1].stride()),
        *(boundaries.flags, slot_bounds(boundaries, groups * family.rows), after[0], after[-1], gates),
        *family.mail("forward", layout, precision, groups, input_gates),
    )
    return after, gates


def run_backward(
    grads: States,
    gates: Tensor,
    w_hh: Tensor,
    stored: States,
    after: States,
    boundaries: Boundaries,
    plan: LayerPlan,
    to_stored: bool,
) -> tuple[Tensor, Tensor]:
    """Run the backward pass: return gradients of the gates and, with ``to_stored``, of the last stored state."""
    tokens, device, layout, precision = gates.shape[0], gates.device, plan.layout, plan.precision
    family, groups, launch = _launch(plan, "backward", processors_of(device), tokens, to_stored)
    grad_gates = torch.empty(tokens, 4 * layout.width, dtype=precision.operands, device=device)
    shape = (tokens if to_stored else 0, layout.hidden)
    grad_stored = (torch.zeros if to_stored else torch.empty)(shape, dtype=torch.float32, device=device)
    if isinstance(family, CudaFamily):
        grads = tuple([grad.float() for grad in grads])
    launch(
        *(grads[0], *grads[0].stride(), grads[-1], *grads[-1].stride()),
        *(gates, family.weights("backward", w_hh, layout, precision), stored[-1], *stored[-1].stride()),
        *(after[0], after[-1], boundaries.flags, slot_bounds(boundaries, groups * family.rows)),
        *(grad_gates, grad_stored, *family.mail("backward", layout, precision, groups, grad_gates)),
    )
    return grad_gates, grad_stored


class Launch(NamedTuple):
    """Launch of a pass.

    Attributes:
        family: configuration of its kernel.
        groups: groups of programs, each with ``family.rows`` slots.
        start: the kernel with its grid and constants.
    """

    family: Family
    groups: int
    start: Callable[..., None]


@lru_cache(maxsize=1024)
def _launch(plan: LayerPlan, direction: Direction, processors: int, tokens: int, flag: bool) -> Launch:
    """Return the launch of a pass over ``tokens`` tokens; ``flag`` is KEEP or TO_STORED."""
    assert plan.chosen is not None
    family: Family = getattr(plan.chosen, direction)
    width = plan.layout.width
    on_chip = family.groups_on(processors, width)
    groups = groups_for(on_chip, family.rows, tokens) * family.programs * family.walks
    programs = groups * family.members_for(width) // family.walks
    return Launch(family, groups, family.launch(direction, plan.layout, plan.precision, programs, flag))
