"""Rewriting of FX graphs so that narrow tensors are computed column by column."""

from recurl.columns.constants import take_constants
from recurl.columns.narrow import Narrow, put_together, take_apart
from recurl.columns.rewriting import MAX_COLUMNS, scalarize_columns, scalarize_loop

__all__ = [
    "MAX_COLUMNS",
    "Narrow",
    "put_together",
    "scalarize_columns",
    "scalarize_loop",
    "take_apart",
    "take_constants",
]
