"""Registry of the built-in kernels for linear recurrences."""

from recurl.recurrence.cpu.linear import CpuLinear
from recurl.recurrence.linear.kernels import LinearRegistry
from recurl.recurrence.linear.loop import LoopLinear, ReferenceLinear
from recurl.recurrence.linear.scan import ScanLinear
from recurl.recurrence.triton.linear import TritonLinear

LINEAR = LinearRegistry(
    (LoopLinear(), ScanLinear(), CpuLinear(), TritonLinear(), ReferenceLinear()), fast=("triton", "cpu")
)
