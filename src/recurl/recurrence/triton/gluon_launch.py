"""Launches of the kernels for sm_90, on tensors. Imported only if Triton is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from recurl.recurrence.cells import States
from recurl.recurrence.triton import cuda_launch
from recurl.recurrence.triton.config import (
    Clustered,
    KernelConfig,
    Quartered,
    Resident,
    Single,
    Wide,
    groups_on,
    padded,
)
from recurl.recurrence.triton.form import Form
from recurl.recurrence.triton.launch import flags_of, groups_for, processors_of, slot_bounds
from recurl.recurrence.triton.layout import GateLayout
from recurl.recurrence.triton.prepared import prepared
from recurl.recurrence.triton.resident_backward import resident_backward_kernel
from recurl.recurrence.triton.resident_forward import resident_forward_kernel
from recurl.recurrence.triton.single_backward import single_backward_kernel
from recurl.recurrence.triton.single_forward import single_forward_kernel
from recurl.recurrence.triton.weights import packed
from recurl.recurrence.triton.wide_backward import wide_backward_kernel
from recurl.recurrence.triton.wide_forward import wide_forward_kernel
from recurl.sequences.index import Boundaries


def run_forward(
    input_gates: Tensor, b_hn: Tensor, w_hh: Tensor, stored: States, boundaries: Boundaries, form: Form, keep: bool
) -> tuple[States, Tensor]:
    """Run the forward pass: return states after every token and, with ``keep``, the gates."""
    tokens, device, layout = input_gates.shape[0], input_gates.device, form.layout
    grid, launch = _grid_and_launch(form, "forward", processors_of(device), tokens, keep)
    after = tuple(torch.empty(tokens, layout.hidden, dtype=torch.float32, device=device) for _ in stored)
    gates = torch.empty(tokens if keep else 0, 4 * layout.width, dtype=form.kept_dtype, device=device)
    launch(
        *(input_gates, b_hn, grid.weights(w_hh, form)),
        *(stored[0], *stored[0].stride(), stored[-1], *stored[-1].stride()),
        *(flags_of(boundaries), slot_bounds(boundaries, grid.slots), after[0], after[-1], gates),
        *grid.mail(2, input_gates, form),
    )
    return after, gates


def run_backward(
    grads: States,
    gates: Tensor,
    w_hh: Tensor,
    stored: States,
    after: States,
    boundaries: Boundaries,
    form: Form,
    to_stored: bool,
) -> tuple[Tensor, Tensor]:
    """Run the backward pass: return gradients of the gates and, with ``to_stored``, of the last stored state."""
    tokens, device, layout = gates.shape[0], gates.device, form.layout
    grid, launch = _grid_and_launch(form, "backward", processors_of(device), tokens, to_stored)
    grad_gates = torch.empty(tokens, 4 * layout.width, dtype=form.dtype, device=device)
    shape = (tokens if to_stored else 0, layout.hidden)
    grad_stored = (torch.zeros if to_stored else torch.empty)(shape, dtype=torch.float32, device=device)
    if isinstance(grid.config, Quartered | Clustered):
        grads = tuple(grad.float() for grad in grads)
    launch(
        *(grads[0], *grads[0].stride(), grads[-1], *grads[-1].stride()),
        *(gates, grid.weights(w_hh, form), stored[-1], *stored[-1].stride()),
        *(after[0], after[-1], flags_of(boundaries), slot_bounds(boundaries, grid.slots)),
        *(grad_gates, grad_stored, *grid.mail(8, grad_gates, form)),
    )
    return grad_gates, grad_stored


@dataclass(frozen=True)
class Grid:
    """Grid of a launch: the kernel, its groups, and arguments that depend on the kernel family."""

    kernel: Any
    direction: str
    config: KernelConfig
    layout: GateLayout
    groups: int
    members: int

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.groups * self.config.rows

    def weights(self, w_hh: Tensor, form: Form) -> Tensor:
        """Return the recurrent weights as the kernel reads them."""
        if not isinstance(self.config, Wide):
            return w_hh
        dtype = self.operands(form.dtype, form.kept_dtype)
        return packed(self.direction, w_hh, self.layout, dtype, form.kept_dtype == torch.float32)

    def mail(self, turns: int, like: Tensor, form: Form) -> tuple[Tensor, ...]:
        """Return the buffers through which the programs of a group exchange values, and their arrival counters."""
        if isinstance(self.config, Single | Quartered | Clustered):
            return ()
        if self.members == 1:
            return like, like  # neither read nor written
        parts = 2 if isinstance(self.config, Wide) and form.kept_dtype == torch.float32 else 1
        dtype = self.operands(form.dtype, form.kept_dtype)
        mail = like.new_empty(self.groups, turns, self.config.rows, parts * self.layout.width, dtype=dtype)
        if not isinstance(self.config, Wide) or self.direction == "forward":
            return mail, torch.zeros(self.groups, dtype=torch.int32, device=like.device)
        shares = self._shares(self.config, form.dtype)
        flags = torch.zeros(self.groups * (1 + self.members // shares), dtype=torch.int32, device=like.device)
        sums = (self.groups, self.layout.width, self.config.rows, shares if shares > 1 else 0)
        return mail, flags, torch.empty(sums, dtype=torch.float32, device=like.device)

    def operands(self, dtype: torch.dtype, kept: torch.dtype) -> torch.dtype:
        """Return the dtype of the operands of the recurrent product, given those of large products and kept gates.

        Weights and h are small numbers, for which float16 has all bits of tf32 in half the bytes.
        """
        tf32 = dtype == torch.float32 and kept != torch.float32
        half = tf32 and isinstance(self.config, Wide) and self.direction == "forward"
        return torch.float16 if half and self.layout.width % 64 == 0 else dtype

    def constants(self, dtype: torch.dtype, kept: torch.dtype) -> dict[str, Any]:
        """Return compile-time arguments and launch options, given the dtypes of operands and kept gates.

        Gates kept in float32 mean that everything is accurate to float32.
        """
        if isinstance(self.config, Quartered | Clustered):
            layout = self.layout
            found = {"HIDDEN": layout.hidden, "WIDTH": layout.width, "LSTM": layout.lstm, "BITS": 8 * dtype.itemsize}
            found |= {"EXACT": kept == torch.float32, "FORWARD": self.direction == "forward"}
            return {**found, **self.config.numbers()}
        specific = {Single: self._single, Resident: self._resident, Wide: self._wide}[type(self.config)]
        exact, operands = kept == torch.float32, self.operands(dtype, kept)
        found = {"HIDDEN": self.layout.hidden, "WIDTH": self.layout.width, "EXACT": exact, **specific(operands, exact)}
        # Programs of a group wait for each other: all of them must be on the chip at once.
        together = {"launch_cooperative_grid": True} if self.members > 1 else {}
        return {**found, "num_warps": found["WARPS"], **together}

    def _single(self, dtype: torch.dtype, exact: bool) -> dict[str, Any]:
        config = cast(Single, self.config)
        fixed = {"UNITS": config.units, "HELD": config.held, "RING": config.ring}
        return {**fixed, "WARPS": config.warps}

    def _resident(self, dtype: torch.dtype, exact: bool) -> dict[str, Any]:
        config, width = cast(Resident, self.config), self.layout.width
        units = config.units or padded(width)
        found = {"BITS": 8 * dtype.itemsize, "ROWS": config.rows, "UNITS": units, "MEMBERS": self.members}
        found |= {"EXTENT": padded(width), "CHUNK": 32 if exact else width & -width, "ACROSS": config.across}
        if self.direction == "forward":
            found["AHEAD"] = config.ahead
        shared = getattr(config, f"{self.direction}_shared")
        return {**found, "SHARED_GATES": shared, "WARPS": units // 16 * config.across}

    def _shares(self, config: Wide, dtype: torch.dtype) -> int:
        """Return how many programs share a product of the backward pass."""
        return config.shares_for(self.layout.width, self.layout.num_gates * self.layout.width * dtype.itemsize // 128)

    def _wide(self, dtype: torch.dtype, exact: bool) -> dict[str, Any]:
        config, width, gates = cast(Wide, self.config), self.layout.width, self.layout.num_gates
        found = {"BITS": 8 * dtype.itemsize, "ROWS": config.rows, "UNITS": config.units, "STAGES": config.stages}
        blocks, weights = width * dtype.itemsize // 128, gates * config.units
        if self.direction == "backward":
            found["SHARES"] = shares = self._shares(config, dtype)
            blocks, weights = gates * blocks // shares, shares * config.units
        pages = config.pages_for(blocks, weights, 2 if exact else 1)
        taken = 1 if exact else config.blocks_at_once(pages, blocks)
        return {**found, "TAKEN": taken, "PAGES": pages, "WALKS": config.walks, "WARPS": config.warps}


@lru_cache(maxsize=1024)
def _grid_and_launch(
    form: Form, direction: str, processors: int, tokens: int, with_aux: bool
) -> tuple[Grid, Callable[..., None]]:
    """Return grid and launch of a pass over ``tokens`` tokens; ``with_aux`` is KEEP or TO_STORED."""
    config: KernelConfig = getattr(form.chosen, direction)
    grid = grid_for(direction, config, form.layout, processors, tokens)
    aux_name = {"forward": "KEEP", "backward": "TO_STORED"}[direction]
    constants = grid.constants(form.dtype, form.kept_dtype)
    programs = grid.groups * grid.members // config.walks
    if isinstance(config, Quartered | Clustered):
        width, constants = form.layout.width, {**constants, aux_name: with_aux}
        shared, source = config.shared_for(width, form.kept_dtype == torch.float32), _SOURCES[type(config)]
        launch = cuda_launch.CudaLaunch(source, grid.kernel, programs, config.threads_for(width), shared, constants)
        return grid, launch
    return grid, prepared(grid.kernel, programs, LSTM=form.layout.lstm, **{aux_name: with_aux}, **constants)


def grid_for(direction: str, config: KernelConfig, layout: GateLayout, processors: int, tokens: int) -> Grid:
    """Return the grid of a pass over ``tokens`` tokens on a GPU with ``processors`` multiprocessors."""
    members = config.members_for(layout.width)
    kernel = _KERNELS[type(config)][direction]
    on_chip = groups_on(processors, config, layout.width)
    groups = groups_for(on_chip, config.rows, tokens) * config.programs * config.walks
    return Grid(kernel, direction, config, layout, groups, members)


_SOURCES = {Quartered: "quartered.cu", Clustered: "clustered.cu"}
_KERNELS: dict[type, dict[str, Any]] = {
    Quartered: {"forward": "quartered_forward_kernel", "backward": "quartered_backward_kernel"},
    Single: {"forward": single_forward_kernel, "backward": single_backward_kernel},
    Resident: {"forward": resident_forward_kernel, "backward": resident_backward_kernel},
    Wide: {"forward": wide_forward_kernel, "backward": wide_backward_kernel},
    Clustered: {"forward": "clustered_forward_kernel", "backward": "clustered_backward_kernel"},
}
