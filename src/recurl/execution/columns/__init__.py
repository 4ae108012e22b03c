"""Rewriting of FX graphs so that narrow tensors are computed column by column."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.execution.columns.constants import take_constants
    from recurl.execution.columns.narrow import ColumnLayout, join_columns, split_columns
    from recurl.execution.columns.rewriting import MAX_COLUMNS, scalarize_columns, scalarize_loop

lazy_names(
    __name__,
    {
        ".constants": "take_constants",
        ".narrow": (
            "ColumnLayout join_columns split_columns Narrow=ColumnLayout put_together=join_columns "
            "take_apart=split_columns"
        ),
        ".rewriting": (
            "MAX_COLUMNS scalarize_columns scalarize_loop WIDEST=MAX_COLUMNS by_columns=scalarize_columns "
            "loop_by_columns=scalarize_loop"
        ),
    },
)

__all__ = [
    "MAX_COLUMNS",
    "ColumnLayout",
    "join_columns",
    "scalarize_columns",
    "scalarize_loop",
    "split_columns",
    "take_constants",
]
