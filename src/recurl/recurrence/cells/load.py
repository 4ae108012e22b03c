"""Built-in cells by name, and loading of cells from text."""

from __future__ import annotations

import importlib
import inspect
from collections import UserDict
from typing import Any

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.importing import with_arguments
from recurl.core.messages import nearest
from recurl.core.ranges import shown
from recurl.recurrence.cells.cell import Cell, cell_of
from recurl.recurrence.cells.gru import GRU
from recurl.recurrence.cells.lstm import LSTM


class _Cells(UserDict[str, Cell]):
    """Cells by name; one given as ``module:name`` of this package is imported on first use."""

    def __getitem__(self, name: str) -> Cell:
        value: Any = self.data[name]
        if isinstance(value, str):
            module, _, variable = value.partition(":")
            value = self.data[name] = getattr(importlib.import_module(f"recurl.recurrence.cells.{module}"), variable)
        return value


_LAZY: Any = {
    "mingru": "minimal:MINGRU",
    "minlstm": "minimal:MINLSTM",
    "lru": "lru:LRU",
    "s5": "s5:S5",
    "rglru": "rglru:RGLRU",
    "ffm": "ffm:FFM",
    "gtrxl": "gtrxl:GTRXL",
    "mlstm": "mlstm:MLSTM",
    "mamba2": "mamba2:MAMBA2",
    "gated_deltanet": "delta:GATED_DELTANET",
    "slstm": "slstm:SLSTM",
    "shm": "shm:SHM",
}
CELLS = _Cells({"lstm": LSTM, "gru": GRU} | _LAZY)
"""Built-in cells by name, used by configurations, benchmarks and the doctor."""


def load_cell(text: str) -> Cell:
    """Load a cell by its name in :data:`CELLS`, or by ``module:Class`` for a user-defined one.

    Options may follow in parentheses, as in the names of cells.

    Raises:
        ArgumentError: there is no such cell, the module can't be imported, the loaded object is not a cell, or the
            cell doesn't accept these options.

    Example:
        >>> load_cell("gru")
        gru
        >>> load_cell("mingru(conv_width=4, feed_forward=0)")
        mingru(conv_width=4, feed_forward=0)
        >>> load_cell("recurl.recurrence.cells.lstm:LSTMCell")
        lstm
        >>> load_cell("gruu")
        Traceback (most recent call last):
        recurl.core.errors.ArgumentError: There is no cell 'gruu'. Did you mean gru? Cells are lstm, gru, ...
    """
    try:
        name, options = with_arguments(text)
    except ValueError as error:
        raise ArgumentError(
            f"The options of a cell must be numbers, strings or None by name, each given once, as in "
            f"s5(state_size=64); got {shown(text)}."
        ) from error
    if not options:
        return _cell(name)
    kind = _kind(name)
    try:
        return cell_of(kind(**options))
    except TypeError as error:
        takes = ", ".join(inspect.signature(kind).parameters) or "none"
        raise ArgumentError(f"The options of {shown(text)} don't fit ({error}); {name} takes {takes}.") from error


def _cell(name: str) -> Cell:
    try:
        return CELLS[name] if name in CELLS else cell_of(_value(name))
    except ArgumentTypeError as error:
        raise ArgumentError(f"{name!r} is not a cell. {error}") from error


def _kind(name: str) -> type[Cell]:
    """Return the cell class to construct with options; only cell classes are ever called."""
    kind = type(CELLS[name]) if name in CELLS else _value(name)
    if isinstance(kind, type) and issubclass(kind, Cell):
        return kind
    raise ArgumentError(f"{name!r} takes no options: it must be a subclass of recurl.recurrence.Cell, got {kind!r}.")


def _value(text: str) -> Any:
    module_name, found, name = text.partition(":")
    if not found or not module_name or not name:
        raise ArgumentError(
            f"There is no cell {shown(text)}.{nearest(text, CELLS)} Cells are {', '.join(CELLS)}, or module:Class "
            "for your own subclass of recurl.recurrence.Cell."
        )
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"The module {module_name!r} of the cell {text!r} can't be imported: {error}. It must be installed, or be "
            "in a folder on PYTHONPATH; the recurl command also looks in the working directory."
        ) from error
    value = getattr(module, name, None)
    if value is None:
        raise ArgumentError(f"The module {module_name!r} has no cell {name!r}.{nearest(name, _cells_in(vars(module)))}")
    return value


def _cells_in(names: dict[str, object]) -> list[str]:
    return [name for name, value in names.items() if isinstance(value, type) and issubclass(value, Cell)]
