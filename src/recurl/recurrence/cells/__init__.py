"""Recurrent cells: the contract, LSTM and GRU, and cells of a user's own by name."""

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
)
from recurl.recurrence.cells.gated import GatedCell, LayerWeights
from recurl.recurrence.cells.gru import GRU
from recurl.recurrence.cells.load import CELLS, load_cell
from recurl.recurrence.cells.lstm import LSTM

__all__ = [
    "CELLS",
    "GRU",
    "LSTM",
    "Cell",
    "Derivatives",
    "GatedCell",
    "LayerWeights",
    "LoopKernel",
    "Shape",
    "Sizes",
    "States",
    "Weights",
    "cell_named",
    "cell_of",
    "check_parameters",
    "load_cell",
    "remember",
]
