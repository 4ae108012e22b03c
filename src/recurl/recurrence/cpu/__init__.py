"""CPU backend: a C++ library with AVX-512, AVX2 and portable kernels, loaded on first use."""

from recurl.recurrence.cpu.kernels import CpuKernels
from recurl.recurrence.cpu.library import INSTRUCTION_SETS, instruction_sets

__all__ = ["INSTRUCTION_SETS", "CpuKernels", "instruction_sets"]
