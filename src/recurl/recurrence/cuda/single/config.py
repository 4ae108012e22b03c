"""Configuration of the kernels with one slot per program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from recurl.recurrence.cuda.family import Direction, GluonFamily
from recurl.recurrence.cuda.layout import GateLayout
from recurl.recurrence.cuda.precision import Precision

__all__ = ["Single"]


@dataclass(frozen=True)
class Single(GluonFamily):
    """Gluon kernels with one slot per program.

    Attributes:
        units: the power of two that holds all hidden units.
        warps: warps per program.
        held: blocks of 16 columns of the weights in registers; the others are in shared memory.
        programs: programs per multiprocessor.
    """

    units: int
    warps: int
    held: int
    programs: int
    rows: int = 1
    walks: int = 1
    ring: ClassVar[int] = 8
    folder: ClassVar[str] = "single"

    def numbers(self, direction: Direction, layout: GateLayout, precision: Precision) -> dict[str, Any]:
        """Return the compile-time arguments that only this family has."""
        return {"UNITS": self.units, "HELD": self.held, "RING": self.ring, "WARPS": self.warps}
