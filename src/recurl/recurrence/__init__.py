"""Recurrence over segments of plain tensors: cells, backends, and layer stacks."""

from recurl.recurrence.backend import (
    BACKENDS,
    DEFAULT_OPTIONS,
    Backend,
    LayerCall,
    Options,
    Support,
    record_backends,
    register_backend,
)
from recurl.recurrence.cells import (
    CELLS,
    GRU,
    LSTM,
    ONE_STEP,
    Cell,
    FFMCell,
    LayerWeights,
    LRUCell,
    MinGRUCell,
    MinLSTMCell,
    RGLRUCell,
    S5Cell,
    Shape,
    Sizes,
    States,
    Time,
    Weights,
    cell_of,
    check_parameters,
    load_cell,
    remember,
    states_of,
)
from recurl.recurrence.cpu import CpuKernels
from recurl.recurrence.experiment import check_step
from recurl.recurrence.kernel_backend import AutogradBackend, KernelBackend
from recurl.recurrence.kernels import Inputs, Kernels
from recurl.recurrence.linear import LINEAR, linear_recurrence
from recurl.recurrence.loop import LoopKernels
from recurl.recurrence.pad import PadBackend
from recurl.recurrence.reference import ReferenceBackend
from recurl.recurrence.scan import ScanBackend
from recurl.recurrence.segments import LinearBackend
from recurl.recurrence.stack import dropout_masks, run_stack, step_stack
from recurl.recurrence.triton import TritonKernels
from recurl.sequences.boundaries import Boundaries, boundaries_of

for _backend in (
    PadBackend(),
    AutogradBackend(LoopKernels()),
    KernelBackend(CpuKernels()),
    KernelBackend(TritonKernels()),
    ScanBackend(),
    ReferenceBackend(),
):
    register_backend(_backend, fast=_backend.name in ("cpu", "triton"))
for _name in LINEAR.names:
    if _name not in ("auto", "fastest", "reference"):  # the reference backend steps through every cell itself
        BACKENDS.register_linear(LinearBackend(_name))

__all__ = [
    "BACKENDS",
    "CELLS",
    "DEFAULT_OPTIONS",
    "GRU",
    "LSTM",
    "ONE_STEP",
    "Backend",
    "Boundaries",
    "Cell",
    "FFMCell",
    "Inputs",
    "KernelBackend",
    "Kernels",
    "LRUCell",
    "LayerCall",
    "LayerWeights",
    "MinGRUCell",
    "MinLSTMCell",
    "Options",
    "PadBackend",
    "RGLRUCell",
    "ReferenceBackend",
    "S5Cell",
    "ScanBackend",
    "Shape",
    "Sizes",
    "States",
    "Support",
    "Time",
    "Weights",
    "boundaries_of",
    "cell_of",
    "check_parameters",
    "check_step",
    "dropout_masks",
    "linear_recurrence",
    "load_cell",
    "record_backends",
    "register_backend",
    "remember",
    "run_stack",
    "states_of",
    "step_stack",
]
