"""The cpu backend: a C++ library with kernels for AVX-512, AVX2 and any other processor, loaded when first needed."""

from recurl.recurrence.cpu.kernels import CpuKernels
from recurl.recurrence.cpu.library import INSTRUCTION_SETS, instruction_sets

__all__ = ["INSTRUCTION_SETS", "CpuKernels", "instruction_sets"]
