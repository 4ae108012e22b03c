"""The cells to choose from, by name."""

from __future__ import annotations

import importlib
from difflib import get_close_matches

from recurl.errors import ArgumentError, ArgumentTypeError
from recurl.recurrence.cells.cell import Cell, cell_of
from recurl.recurrence.cells.gru import GRU
from recurl.recurrence.cells.lstm import LSTM

CELLS: dict[str, Cell] = {cell.name: cell for cell in (LSTM, GRU)}
"""The built-in cells: what configurations, benchmarks and the doctor choose from."""


def load_cell(text: str) -> Cell:
    """Return a cell by its name in :data:`CELLS`, or ``module:Class`` for one of a user's own.

    Raises:
        ArgumentError: there is no such cell, the module can't be imported, or what it holds is no cell.

    Example:
        >>> load_cell("gru")
        gru
        >>> load_cell("recurl.recurrence.cells.lstm:LSTMCell")
        lstm
        >>> load_cell("gruu")
        Traceback (most recent call last):
        recurl.errors.ArgumentError: There is no cell 'gruu'. Did you mean 'gru'? Cells are lstm, gru, or ...
    """
    if text in CELLS:
        return CELLS[text]
    module_name, found, name = text.partition(":")
    if not found or not module_name or not name:
        raise ArgumentError(
            f"There is no cell {text!r}.{_nearest(text, list(CELLS))} Cells are {', '.join(CELLS)}, or module:Class "
            "for a subclass of recurl.recurrence.Cell of your own."
        )
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"The module {module_name!r} of the cell {text!r} can't be imported: {error}. It must be installed, or lie "
            "in a folder on PYTHONPATH; the recurl command looks in the working directory too."
        ) from error
    value = getattr(module, name, None)
    if value is None:
        raise ArgumentError(
            f"The module {module_name!r} has no cell {name!r}.{_nearest(name, _cells_in(vars(module)))}"
        )
    try:
        return cell_of(value)
    except ArgumentTypeError as error:
        raise ArgumentError(f"{text!r} is no cell. {error}") from error


def _cells_in(names: dict[str, object]) -> list[str]:
    return [name for name, value in names.items() if isinstance(value, type) and issubclass(value, Cell)]


def _nearest(text: str, names: list[str]) -> str:
    close = get_close_matches(text, names, 1)
    return f" Did you mean {close[0]!r}?" if close else ""
