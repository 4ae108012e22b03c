"""Configuration of the kernels in rows.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.recurrence.cuda.family import CudaFamily

__all__ = ["Rows"]


@dataclass(frozen=True)
class Rows(CudaFamily):
    """CUDA C++ kernels with one slot per CTA: four threads for each hidden unit.

    Attributes:
        programs: CTAs per multiprocessor.
    """

    programs: int
    rows: int = 1
    walks: int = 1
    source: ClassVar[str] = "rows/rows.cu"

    def threads_for(self, width: int) -> int:
        """Return the threads of a CTA."""
        return 4 * width

    def numbers(self) -> dict[str, int]:
        """Return the macros that depend on this configuration."""
        return {"PROGRAMS": self.programs}
