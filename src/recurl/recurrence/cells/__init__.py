"""Recurrent cells: the base class, the built-in cells, and loading of cells by name."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names
from recurl.recurrence.cells.by_hand import Derivatives, LoopKernel, States
from recurl.recurrence.cells.cell import (
    Cell,
    Shape,
    Sizes,
    Weights,
    cell_named,
    cell_of,
    check_parameters,
    remember,
    states_of,
)
from recurl.recurrence.cells.gated import GatedCell, LayerWeights
from recurl.recurrence.cells.gru import GRU
from recurl.recurrence.cells.load import CELLS, load_cell
from recurl.recurrence.cells.lstm import LSTM
from recurl.recurrence.cells.time import ONE_STEP, OneStep, Time

if TYPE_CHECKING:
    from recurl.recurrence.cells.delta import GatedDeltaNetCell
    from recurl.recurrence.cells.ffm import FFMCell
    from recurl.recurrence.cells.gtrxl import GTrXLCell
    from recurl.recurrence.cells.lru import LRUCell
    from recurl.recurrence.cells.mamba2 import Mamba2Cell
    from recurl.recurrence.cells.minimal import MinGRUCell, MinLSTMCell
    from recurl.recurrence.cells.mlstm import MLSTMCell
    from recurl.recurrence.cells.rglru import RGLRUCell
    from recurl.recurrence.cells.s5 import S5Cell
    from recurl.recurrence.cells.shm import SHMCell
    from recurl.recurrence.cells.slstm import SLSTMCell

lazy_names(
    __name__,
    {
        ".delta": "GatedDeltaNetCell",
        ".ffm": "FFMCell",
        ".gtrxl": "GTrXLCell",
        ".lru": "LRUCell",
        ".mamba2": "Mamba2Cell",
        ".minimal": "MinGRUCell MinLSTMCell",
        ".mlstm": "MLSTMCell",
        ".rglru": "RGLRUCell",
        ".s5": "S5Cell",
        ".shm": "SHMCell",
        ".slstm": "SLSTMCell",
    },
)

__all__ = [
    "CELLS",
    "GRU",
    "LSTM",
    "ONE_STEP",
    "Cell",
    "Derivatives",
    "FFMCell",
    "GTrXLCell",
    "GatedCell",
    "GatedDeltaNetCell",
    "LRUCell",
    "LayerWeights",
    "LoopKernel",
    "MLSTMCell",
    "Mamba2Cell",
    "MinGRUCell",
    "MinLSTMCell",
    "OneStep",
    "RGLRUCell",
    "S5Cell",
    "SHMCell",
    "SLSTMCell",
    "Shape",
    "Sizes",
    "States",
    "Time",
    "Weights",
    "cell_named",
    "cell_of",
    "check_parameters",
    "load_cell",
    "remember",
    "states_of",
]
