"""Recurrence over segments of plain tensors: cells, backends, and layer stacks."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names
from recurl.recurrence import built_in as built_in
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
    LayerWeights,
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
from recurl.recurrence.kernels import Inputs, Kernels
from recurl.recurrence.stack import dropout_masks, run_stack, step_stack
from recurl.sequences.index import Boundaries, boundaries_of

if TYPE_CHECKING:
    from recurl.recurrence.attention import windowed_attention
    from recurl.recurrence.cells import (
        FFMCell,
        GatedDeltaNetCell,
        GTrXLCell,
        LRUCell,
        Mamba2Cell,
        MinGRUCell,
        MinLSTMCell,
        MLSTMCell,
        RGLRUCell,
        S5Cell,
        SHMCell,
        SLSTMCell,
    )
    from recurl.recurrence.experiment import check_step
    from recurl.recurrence.kernel_backend import KernelBackend
    from recurl.recurrence.linear import linear_recurrence
    from recurl.recurrence.matrix import gated_matrix_recurrence
    from recurl.recurrence.pad import PadBackend
    from recurl.recurrence.reference import ReferenceBackend
    from recurl.recurrence.scan import ScanBackend

lazy_names(
    __name__,
    {
        ".attention": "windowed_attention",
        ".cells": (
            "FFMCell GTrXLCell GatedDeltaNetCell LRUCell MLSTMCell Mamba2Cell MinGRUCell MinLSTMCell RGLRUCell S5Cell "
            "SHMCell SLSTMCell"
        ),
        ".experiment": "check_step",
        ".kernel_backend": "KernelBackend",
        ".linear": "linear_recurrence",
        ".matrix": "gated_matrix_recurrence",
        ".pad": "PadBackend",
        ".reference": "ReferenceBackend",
        ".scan": "ScanBackend",
    },
)

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
    "GTrXLCell",
    "GatedDeltaNetCell",
    "Inputs",
    "KernelBackend",
    "Kernels",
    "LRUCell",
    "LayerCall",
    "LayerWeights",
    "MLSTMCell",
    "Mamba2Cell",
    "MinGRUCell",
    "MinLSTMCell",
    "Options",
    "PadBackend",
    "RGLRUCell",
    "ReferenceBackend",
    "S5Cell",
    "SHMCell",
    "SLSTMCell",
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
    "gated_matrix_recurrence",
    "linear_recurrence",
    "load_cell",
    "record_backends",
    "register_backend",
    "remember",
    "run_stack",
    "states_of",
    "step_stack",
    "windowed_attention",
]
