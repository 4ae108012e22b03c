"""Slots of the stream of tokens, and launches of pointwise kernels. Imported only if Triton is installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from recurl.recurrence.cuda import pointwise
from recurl.recurrence.cuda.layout import GateLayout
from recurl.recurrence.cuda.prepared import PreparedLaunch, prepared
from recurl.sequences.index import Boundaries, is_captured

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
    starts = boundaries.starts
    plans = {} if is_captured(starts) else boundaries.plans
    bounds = plans.get(slots)
    if bounds is None:
        tokens = starts.shape[0]
        share = share_for(tokens, slots, boundaries.batch_shape[-1])
        bounds = torch.empty(slots + 1, dtype=torch.int64, device=starts.device)
        _bounds_launch(slots)(boundaries.flags, bounds, tokens, share)
        plans[slots] = bounds
    return bounds


@lru_cache(maxsize=256)
def _bounds_launch(slots: int) -> PreparedLaunch:
    return prepared(pointwise.bounds_kernel, slots + 1, BLOCK=_BLOCK, num_warps=4)


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
    launch(stored, *stored.stride(), after, boundaries.flags, before, numbers)
    return before


@lru_cache(maxsize=256)
def _previous_launch(programs: int, hidden: int) -> PreparedLaunch:
    return prepared(pointwise.previous_kernel, programs, HIDDEN=hidden, BLOCK=_BLOCK, num_warps=4)


def finish_gates(
    input_gates: Tensor, hidden_gates: Tensor, b_hn: Tensor, layout: GateLayout, dtype: torch.dtype
) -> Tensor:
    """Return the gates ``[N, 4 * W]`` of all tokens at once, as the forward kernels keep them."""
    tokens, hidden = input_gates.shape[0], layout.hidden
    make = torch.zeros if layout.width != hidden else torch.empty
    gates = make(tokens, 4 * layout.width, dtype=dtype, device=input_gates.device)
    constants = {**layout.constants, "BLOCK": _BLOCK, "num_warps": 4}
    launch = prepared(pointwise.gates_kernel, -(-tokens * hidden // _BLOCK), **constants)
    launch(input_gates, hidden_gates, b_hn, gates, tokens * hidden)
    return gates


def start(kernel: Any, *programs: int) -> Callable[..., None]:
    """Return ``kernel`` with its grid."""
    return kernel[programs]
