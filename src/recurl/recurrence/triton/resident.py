"""Launches of the Gluon kernels: from tensors to tensors. Imported only where Triton is installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurl.recurrence.boundaries import Boundaries
from recurl.recurrence.cells import States
from recurl.recurrence.triton.config import Resident
from recurl.recurrence.triton.launch import flags_of, groups_for, on, slot_bounds, start
from recurl.recurrence.triton.layout import Layout
from recurl.recurrence.triton.resident_backward import resident_backward_kernel
from recurl.recurrence.triton.resident_forward import resident_forward_kernel


def run_forward(
    input_gates: Tensor,
    b_hn: Tensor,
    w_hh: Tensor,
    stored: States,
    boundaries: Boundaries,
    layout: Layout,
    config: Resident,
    keep: bool,
) -> tuple[States, Tensor]:
    """The forward walk. Returns the states after every token and, with ``keep``, the gates in float16."""
    tokens, device = input_gates.shape[0], input_gates.device
    groups = groups_for(config.members, config.rows, device, tokens) * config.programs
    after = tuple(torch.empty(tokens, layout.hidden, dtype=torch.float32, device=device) for _ in stored)
    gates = torch.empty(tokens if keep else 0, 4 * layout.width, dtype=torch.float16, device=device)
    with on(device):
        start(resident_forward_kernel, groups * config.members)(
            *(input_gates, b_hn, w_hh),
            *(stored[0], stored[0].stride(0), stored[0].stride(1)),
            *(stored[-1], stored[-1].stride(0), stored[-1].stride(1)),
            *(flags_of(boundaries), slot_bounds(boundaries, groups * config.rows), after[0], after[-1], gates),
            *_mail(config, layout, groups, 2, input_gates),
            HIDDEN=layout.hidden,
            WIDTH=layout.width,
            LSTM=layout.lstm,
            KEEP=keep,
            BITS=_bits(input_gates),
            **_shape(config, layout),
            SHARED_GATES=config.forward_shared,
            AHEAD=config.ahead,
            **_options(config, layout),
        )
    return after, gates


def run_backward(
    grads: States,
    gates: Tensor,
    w_hh: Tensor,
    stored: States,
    after: States,
    boundaries: Boundaries,
    layout: Layout,
    config: Resident,
    dtype: torch.dtype,
    to_stored: bool,
) -> tuple[Tensor, Tensor]:
    """The backward walk. Returns the gradients of the gates and, with ``to_stored``, of the last stored state."""
    tokens, device = gates.shape[0], gates.device
    groups = groups_for(config.members, config.rows, device, tokens) * config.programs
    grad_gates = torch.empty(tokens, 4 * layout.width, dtype=dtype, device=device)
    grad_stored = torch.zeros(tokens if to_stored else 0, layout.hidden, dtype=torch.float32, device=device)
    with on(device):
        start(resident_backward_kernel, groups * config.members)(
            *(grads[0], grads[0].stride(0), grads[0].stride(1)),
            *(grads[-1], grads[-1].stride(0), grads[-1].stride(1)),
            *(gates, w_hh, stored[-1], stored[-1].stride(0), stored[-1].stride(1)),
            *(after[0], after[-1], flags_of(boundaries), slot_bounds(boundaries, groups * config.rows)),
            *(grad_gates, grad_stored),
            *_mail(config, layout, groups, 8, grad_gates),
            HIDDEN=layout.hidden,
            WIDTH=layout.width,
            LSTM=layout.lstm,
            TO_STORED=to_stored,
            BITS=_bits(grad_gates),
            **_shape(config, layout),
            SHARED_GATES=config.backward_shared,
            **_options(config, layout),
        )
    return grad_gates, grad_stored


def _bits(values: Tensor) -> int:
    return 8 * values.element_size()


def _mail(config: Resident, layout: Layout, groups: int, turns: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Where the programs of a group leave values for each other, and their arrivals."""
    size = (groups, turns, config.rows, layout.width) if config.members > 1 else (1,)
    return like.new_empty(size), torch.zeros(groups, dtype=torch.int32, device=like.device)


def _shape(config: Resident, layout: Layout) -> dict[str, int]:
    units = layout.width // config.members
    return {"ROWS": config.rows, "WARPS": units // 16, "UNITS": units, "MEMBERS": config.members}


def _options(config: Resident, layout: Layout) -> dict[str, Any]:
    # Programs of a group wait for each other: all of them must be on the chip at once.
    together = {"launch_cooperative_grid": True} if config.members > 1 else {}
    return {"num_warps": layout.width // config.members // 16, **together}
