"""Rewriting of FX graphs so that narrow tensors are computed column by column."""

from recurl.execution.columns.constants import take_constants
from recurl.execution.columns.narrow import ColumnLayout, join_columns, split_columns
from recurl.execution.columns.rewriting import MAX_COLUMNS, scalarize_columns, scalarize_loop

__all__ = [
    "MAX_COLUMNS",
    "ColumnLayout",
    "join_columns",
    "scalarize_columns",
    "scalarize_loop",
    "split_columns",
    "take_constants",
]

# Names of earlier versions.
Narrow, WIDEST = ColumnLayout, MAX_COLUMNS
by_columns, loop_by_columns = scalarize_columns, scalarize_loop
take_apart, put_together = split_columns, join_columns
