"""The cells to choose from, by name."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

from recurl.errors import ArgumentError, ArgumentTypeError
from recurl.nearest import nearest
from recurl.recurrence.cells.cell import Cell, cell_of
from recurl.recurrence.cells.ffm import FFM
from recurl.recurrence.cells.gru import GRU
from recurl.recurrence.cells.lru import LRU
from recurl.recurrence.cells.lstm import LSTM
from recurl.recurrence.cells.minimal import MINGRU, MINLSTM
from recurl.recurrence.cells.rglru import RGLRU
from recurl.recurrence.cells.s5 import S5

CELLS: dict[str, Cell] = {cell.name: cell for cell in (LSTM, GRU, MINGRU, MINLSTM, LRU, S5, RGLRU, FFM)}
"""The built-in cells: what configurations, benchmarks and the doctor choose from."""


def load_cell(text: str) -> Cell:
    """Return a cell by its name in :data:`CELLS`, or ``module:Class`` for one of a user's own.

    Its options may follow in brackets, as in the names of cells.

    Raises:
        ArgumentError: there is no such cell, the module can't be imported, what it holds is no cell, or the cell
            doesn't take these options.

    Example:
        >>> load_cell("gru")
        gru
        >>> load_cell("mingru(conv_width=4, feed_forward=0)")
        mingru(conv_width=4, feed_forward=0)
        >>> load_cell("recurl.recurrence.cells.lstm:LSTMCell")
        lstm
        >>> load_cell("gruu")
        Traceback (most recent call last):
        recurl.errors.ArgumentError: There is no cell 'gruu'. Did you mean gru? Cells are lstm, gru, ...
    """
    name, bracket, rest = text.partition("(")
    if not bracket:
        return _cell(text)
    kind = type(CELLS[name]) if name in CELLS else _value(name)
    try:
        return cell_of(kind(**_options(text, rest)))
    except TypeError as error:
        takes = ", ".join(inspect.signature(kind).parameters) or "none"
        raise ArgumentError(f"The options of {text!r} don't fit ({error}); {name} takes {takes}.") from error


def _options(text: str, rest: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"cell({rest}", mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            return {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
    except (SyntaxError, ValueError):
        pass
    raise ArgumentError(
        f"The options of a cell must be numbers, texts or None by name, as in s5(state_size=64); got {text!r}."
    )


def _cell(text: str) -> Cell:
    if text in CELLS:
        return CELLS[text]
    try:
        return cell_of(_value(text))
    except ArgumentTypeError as error:
        raise ArgumentError(f"{text!r} is no cell. {error}") from error


def _value(text: str) -> Any:
    module_name, found, name = text.partition(":")
    if not found or not module_name or not name:
        raise ArgumentError(
            f"There is no cell {text!r}.{nearest(text, CELLS)} Cells are {', '.join(CELLS)}, or module:Class "
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
        raise ArgumentError(f"The module {module_name!r} has no cell {name!r}.{nearest(name, _cells_in(vars(module)))}")
    return value


def _cells_in(names: dict[str, object]) -> list[str]:
    return [name for name, value in names.items() if isinstance(value, type) and issubclass(value, Cell)]
