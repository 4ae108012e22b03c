"""Recurrence over segments, on plain tensors: cells, backends, layers."""

from recurl.recurrence.backend import BACKENDS, DEFAULT_OPTIONS, Backend, LayerCall, Options, Support, record_backends
from recurl.recurrence.boundaries import Boundaries, boundaries_of
from recurl.recurrence.cells import CELLS, GRU, LSTM, Cell, LayerWeights
from recurl.recurrence.cpu import CpuKernels
from recurl.recurrence.kernel_backend import KernelBackend
from recurl.recurrence.loop import LoopKernels
from recurl.recurrence.ops import Kernels
from recurl.recurrence.pad import PadBackend
from recurl.recurrence.reference import ReferenceBackend
from recurl.recurrence.scan import ScanBackend
from recurl.recurrence.stack import dropout_masks, run_stack, step_stack
from recurl.recurrence.triton import TritonKernels

for _backend in (
    PadBackend(),
    KernelBackend(LoopKernels()),
    KernelBackend(CpuKernels()),
    KernelBackend(TritonKernels()),
    ScanBackend(),
    ReferenceBackend(),
):
    BACKENDS.register(_backend)

__all__ = [
    "BACKENDS",
    "CELLS",
    "DEFAULT_OPTIONS",
    "GRU",
    "LSTM",
    "Backend",
    "Boundaries",
    "Cell",
    "KernelBackend",
    "Kernels",
    "LayerCall",
    "LayerWeights",
    "Options",
    "PadBackend",
    "ReferenceBackend",
    "ScanBackend",
    "Support",
    "boundaries_of",
    "dropout_masks",
    "record_backends",
    "run_stack",
    "step_stack",
]
