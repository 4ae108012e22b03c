"""Forward and backward pass of the portable kernels, on tensors. Imported only if Triton is installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurl.recurrence.cells import States
from recurl.recurrence.cuda.launch import groups_for, processors_of, slot_bounds
from recurl.recurrence.cuda.portable import backward, forward
from recurl.recurrence.cuda.portable.config import Tile
from recurl.recurrence.cuda.precision import Precision
from recurl.recurrence.cuda.prepared import prepared
from recurl.sequences.index import Boundaries

_ALL_STEPS = 2**31 - 1


def run_forward(
    input_gates: Tensor,
    b_hn: Tensor,
    w_hh: Tensor,
    stored: States,
    boundaries: Boundaries,
    tile: Tile,
    precision: Precision,
    keep: bool,
) -> tuple[States, Tensor]:
    """Run the forward pass: return states after every token and, with ``keep``, the gates."""
    tokens, hidden, lstm = input_gates.shape[0], w_hh.shape[1], len(stored) == 2
    device = input_gates.device
    groups = groups_for(processors_of(device) // tile.members, tile.rows, tokens)
    bounds = slot_bounds(boundaries, groups * tile.rows)
    after = tuple(torch.empty(tokens, hidden, dtype=torch.float32, device=device) for _ in stored)
    gates = torch.empty(tokens if keep else 0, 4 * hidden, dtype=precision.kept, device=device)
    flags = torch.zeros(groups, dtype=torch.int32, device=device)
    if precision.name == "ieee":  # no tensor cores: threads read adjacent units, which should be adjacent in memory
        w_hh = w_hh.t().contiguous().t()
    arguments = (
        *(input_gates, b_hn, w_hh, *w_hh.stride()),
        *(stored[0], *stored[0].stride(), stored[-1], *stored[-1].stride()),
        *(boundaries.flags, bounds, after[0], after[-1], gates, flags),
    )
    constants = {"HIDDEN": hidden, "LSTM": lstm, "KEEP": keep, "PRECISION": precision.name}
    _launch(forward.forward_kernel, arguments, constants, tile, groups, bounds)
    return after, gates


def run_backward(
    grads: States,
    gates: Tensor,
    w_hh: Tensor,
    stored: States,
    after: States,
    boundaries: Boundaries,
    tile: Tile,
    precision: Precision,
    to_stored: bool,
) -> tuple[Tensor, Tensor]:
    """Run the backward pass: return gradients of the gates and, with ``to_stored``, of the last stored state."""
    tokens, hidden, lstm = gates.shape[0], w_hh.shape[1], len(stored) == 2
    device = gates.device
    groups = groups_for(processors_of(device) // tile.members, tile.rows, tokens)
    bounds = slot_bounds(boundaries, groups * tile.rows)
    grad_gates = torch.empty(tokens, 4 * hidden, dtype=precision.operands, device=device)
    grad_stored = torch.zeros(tokens if to_stored else 0, hidden, dtype=torch.float32, device=device)
    carry = torch.zeros(groups * tile.rows, tile.members * tile.units, dtype=torch.float32, device=device)
    flags = torch.zeros(groups, dtype=torch.int32, device=device)
    arguments = (
        *(grads[0], *grads[0].stride(), grads[-1], *grads[-1].stride()),
        *(gates, w_hh, stored[-1], *stored[-1].stride()),
        *(after[0], after[-1], boundaries.flags, bounds, grad_gates, grad_stored, carry, flags),
    )
    constants = {"HIDDEN": hidden, "LSTM": lstm, "TO_STORED": to_stored, "PRECISION": precision.name}
    _launch(backward.backward_kernel, arguments, constants, tile, groups, bounds)
    return grad_gates, grad_stored


def _launch(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], tile: Tile, groups: int, bounds: Tensor
) -> None:
    constants = {
        **constants,
        "ROWS": tile.rows,
        "UNITS": tile.units,
        "MEMBERS": tile.members,
        "BLOCK_K": tile.block_k,
        "RESIDENT": tile.resident,
    }
    if bounds.device.type != "cuda":  # interpreted programs run one after another and can't wait for each other
        launch = prepared(kernel, groups * tile.members, **constants)
        for step in range(int(bounds.diff().max())):
            launch(*arguments, step, step + 1)
        return
    # Programs of a group wait for each other: all of them must be on the chip at once.
    together: dict[str, Any] = {"launch_cooperative_grid": True} if tile.members > 1 else {}
    # One stage: the compiler must not fetch the next step's state before the group has met.
    options = {"num_warps": tile.warps, "num_stages": 1, **together}
    prepared(kernel, groups * tile.members, **constants, **options)(*arguments, 0, _ALL_STEPS)
