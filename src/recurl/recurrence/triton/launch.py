"""Launches of the plain Triton kernels, on tensors. Imported only if Triton is installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from recurl.recurrence.cells import States
from recurl.recurrence.triton import backward, forward, walk
from recurl.recurrence.triton.config import Tile
from recurl.recurrence.triton.layout import GateLayout
from recurl.recurrence.triton.prepared import PreparedLaunch, prepared
from recurl.sequences.index import Boundaries

_ALL_STEPS = 2**31 - 1
_BLOCK = 1024
_INTERPRETED_PROCESSORS = 4
_HERE = nullcontext()


@cache
def processors_of(device: torch.device) -> int:
    """Return the number of multiprocessors of ``device``; a small number where kernels are interpreted."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def groups_for(on_chip: int, rows: int, tokens: int) -> int:
    """Return the number of groups, at most the ``on_chip`` that run at once, that ``tokens`` tokens can occupy."""
    return max(1, min(on_chip, -(-tokens // rows)))


def share_for(tokens: int, slots: int, length: int) -> int:
    """Return the tokens per slot: N / slots, rounded up.

    It is also rounded up to a multiple of the rows' ``length`` if that adds at most 3 / 4.
    A slot of whole rows ends where its share ends. Any other slot continues to the end of a segment, possibly that of a
    row, so it gains only if its share and the longest of these rests together are less than a row.
    """
    share = -(-tokens // slots)
    whole_rows = -(-share // length) * length
    return whole_rows if 4 * whole_rows <= 7 * share else share


def slot_bounds(boundaries: Boundaries, slots: int) -> Tensor:
    """Return int64 ``[slots + 1]``: the token ranges of the slots, computed once per batch and number of slots.

    During the capture of a CUDA graph it is always computed, since a replay brings other segments.
    """
    capturing = boundaries.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    plans = {} if capturing else boundaries.plans
    bounds = plans.get(slots)
    if bounds is None:
        tokens = boundaries.num_tokens
        share = share_for(tokens, slots, boundaries.batch_shape[-1])
        bounds = torch.empty(slots + 1, dtype=torch.int64, device=boundaries.device)
        _bounds_launch(slots)(flags_of(boundaries), bounds, tokens, share)
        plans[slots] = bounds
    return bounds


@lru_cache(maxsize=256)
def _bounds_launch(slots: int) -> PreparedLaunch:
    return prepared(walk.bounds_kernel, slots + 1, BLOCK=_BLOCK, num_warps=4)


def flags_of(boundaries: Boundaries) -> Tensor:
    """Return uint8 ``[N]``: 1 at the first token of each segment."""
    flags = boundaries.plans.get("flags")
    if flags is None:
        flags = boundaries.plans["flags"] = boundaries.starts.view(torch.uint8)
    return flags


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current device while kernels are launched."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else _HERE


def states_before(stored: Tensor, after: Tensor, boundaries: Boundaries, dtype: torch.dtype) -> Tensor:
    """Return the state before every token, ``[N, H]``: stored at segment starts, else after the previous token."""
    after = after.contiguous()
    before = torch.empty_like(after, dtype=dtype)
    numbers = after.numel()
    launch = _previous_launch(-(-numbers // _BLOCK), after.shape[1])
    launch(stored, *stored.stride(), after, flags_of(boundaries), before, numbers)
    return before


@lru_cache(maxsize=256)
def _previous_launch(programs: int, hidden: int) -> PreparedLaunch:
    return prepared(walk.previous_kernel, programs, HIDDEN=hidden, BLOCK=_BLOCK, num_warps=4)


def finish_gates(
    input_gates: Tensor, hidden_gates: Tensor, b_hn: Tensor, layout: GateLayout, dtype: torch.dtype
) -> Tensor:
    """Return the gates ``[N, 4 * W]`` of all tokens at once, as the forward kernels keep them."""
    tokens, hidden = input_gates.shape[0], layout.hidden
    make = torch.zeros if layout.width != hidden else torch.empty
    gates = make(tokens, 4 * layout.width, dtype=dtype, device=input_gates.device)
    constants = {**layout.constants, "BLOCK": _BLOCK, "num_warps": 4}
    launch = prepared(walk.gates_kernel, -(-tokens * hidden // _BLOCK), **constants)
    launch(input_gates, hidden_gates, b_hn, gates, tokens * hidden)
    return gates


def run_forward(
    input_gates: Tensor,
    b_hn: Tensor,
    w_hh: Tensor,
    stored: States,
    boundaries: Boundaries,
    tile: Tile,
    precision: str,
    keep: torch.dtype | None,
) -> tuple[States, Tensor]:
    """Run the forward pass: return states after every token, and gates in dtype ``keep`` (no gates if None)."""
    tokens, hidden, lstm = input_gates.shape[0], w_hh.shape[1], len(stored) == 2
    device = input_gates.device
    groups = groups_for(processors_of(device) // tile.members, tile.rows, tokens)
    bounds = slot_bounds(boundaries, groups * tile.rows)
    after = tuple(torch.empty(tokens, hidden, dtype=torch.float32, device=device) for _ in stored)
    gates = torch.empty(tokens if keep else 0, 4 * hidden, dtype=keep or torch.float32, device=device)
    flags = torch.zeros(groups, dtype=torch.int32, device=device)
    if precision == "ieee":  # no tensor cores: threads read adjacent units, which should be adjacent in memory
        w_hh = w_hh.t().contiguous().t()
    arguments = (
        *(input_gates, b_hn, w_hh, *w_hh.stride()),
        *(stored[0], *stored[0].stride(), stored[-1], *stored[-1].stride()),
        *(flags_of(boundaries), bounds, after[0], after[-1], gates, flags),
    )
    constants = {"HIDDEN": hidden, "LSTM": lstm, "KEEP": keep is not None, "PRECISION": precision}
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
    precision: str,
    dtype: torch.dtype,
    to_stored: bool,
) -> tuple[Tensor, Tensor]:
    """Run the backward pass: return gradients of the gates and, with ``to_stored``, of the last stored state."""
    tokens, hidden, lstm = gates.shape[0], w_hh.shape[1], len(stored) == 2
    device = gates.device
    groups = groups_for(processors_of(device) // tile.members, tile.rows, tokens)
    bounds = slot_bounds(boundaries, groups * tile.rows)
    grad_gates = torch.empty(tokens, 4 * hidden, dtype=dtype, device=device)
    grad_stored = torch.zeros(tokens if to_stored else 0, hidden, dtype=torch.float32, device=device)
    carry = torch.zeros(groups * tile.rows, tile.members * tile.units, dtype=torch.float32, device=device)
    flags = torch.zeros(groups, dtype=torch.int32, device=device)
    arguments = (
        *(grads[0], *grads[0].stride(), grads[-1], *grads[-1].stride()),
        *(gates, w_hh, stored[-1], *stored[-1].stride()),
        *(after[0], after[-1], flags_of(boundaries), bounds, grad_gates, grad_stored, carry, flags),
    )
    constants = {"HIDDEN": hidden, "LSTM": lstm, "TO_STORED": to_stored, "PRECISION": precision}
    _launch(backward.backward_kernel, arguments, constants, tile, groups, bounds)
    return grad_gates, grad_stored


def start(kernel: Any, *programs: int) -> Callable[..., None]:
    """Return ``kernel`` with its grid."""
    return kernel[programs]


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
