"""Recurrence over segments, on plain tensors: cells, backends, layers."""

from recurl.recurrence.backend import BACKENDS, Backend, LayerCall, Options, Support, record_backends
from recurl.recurrence.boundaries import Boundaries, boundaries_of
from recurl.recurrence.cells import CELLS, GRU, LSTM, Cell, LayerWeights
from recurl.recurrence.loop import LoopBackend
from recurl.recurrence.pad import PadBackend
from recurl.recurrence.reference import ReferenceBackend
from recurl.recurrence.stack import dropout_masks, run_stack, step_stack

for _backend in (PadBackend(), LoopBackend(), ReferenceBackend()):
    BACKENDS.register(_backend)

__all__ = [
    "BACKENDS",
    "CELLS",
    "GRU",
    "LSTM",
    "Backend",
    "Boundaries",
    "Cell",
    "LayerCall",
    "LayerWeights",
    "LoopBackend",
    "Options",
    "PadBackend",
    "ReferenceBackend",
    "Support",
    "boundaries_of",
    "dropout_masks",
    "record_backends",
    "run_stack",
    "step_stack",
]
