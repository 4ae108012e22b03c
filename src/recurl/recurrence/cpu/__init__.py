"""CPU backend: layers, linear recurrences and steps by the kernels of the C++ library."""

from recurl.native.library import INSTRUCTION_SETS, instruction_sets
from recurl.recurrence.cpu.kernels import CpuKernels

__all__ = ["INSTRUCTION_SETS", "CpuKernels", "instruction_sets"]
