"""Configuration of the kernels that keep the recurrent weights on the chip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from recurl.recurrence.cuda.family import Direction, GluonFamily
from recurl.recurrence.cuda.layout import GateLayout, padded
from recurl.recurrence.cuda.precision import Precision

__all__ = ["Resident"]


@dataclass(frozen=True)
class Resident(GluonFamily):
    """Gluon kernels that keep the recurrent weights on the chip.

    Attributes:
        forward_shared: gates whose weights are in shared memory instead of registers in the forward pass.
        ahead: number of steps that the forward pass prefetches input gates.
        backward_shared: as ``forward_shared``, in the backward pass.
        programs: programs per multiprocessor.
        units: units of one program, where a group of programs holds all units; 0 if one program holds them all.
        rows: slots that a group processes together.
        across: warps that share these slots, with 16 units each.
    """

    forward_shared: int
    ahead: int
    backward_shared: int
    programs: int
    units: int = 0
    rows: int = 8
    across: int = 1
    walks: int = 1
    folder: ClassVar[str] = "resident"

    def members_for(self, width: int) -> int:
        """Return the number of programs of a group."""
        return width // self.units if self.units else 1

    def numbers(self, direction: Direction, layout: GateLayout, precision: Precision) -> dict[str, Any]:
        """Return the compile-time arguments that only this family has."""
        width, forward = layout.width, direction == "forward"
        units = self.units or padded(width)
        found = {"BITS": precision.bits, "ROWS": self.rows, "UNITS": units, "MEMBERS": self.members_for(width)}
        found |= {"EXTENT": padded(width), "CHUNK": 32 if precision.exact else width & -width, "ACROSS": self.across}
        found |= {"AHEAD": self.ahead} if forward else {}
        shared = self.forward_shared if forward else self.backward_shared
        return {**found, "SHARED_GATES": shared, "WARPS": units // 16 * self.across}

    def mail(
        self, direction: Direction, layout: GateLayout, precision: Precision, groups: int, like: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the double buffer of h, or of the gradients of the gates, and the arrival counters."""
        if self.members_for(layout.width) == 1:
            return like, like  # neither read nor written
        turns = 2 if direction == "forward" else 8
        mail = like.new_empty(groups, turns, self.rows, layout.width, dtype=precision.operands)
        return mail, torch.zeros(groups, dtype=torch.int32, device=like.device)
