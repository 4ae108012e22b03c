"""Graphs of operations whose narrow tensors are computed column by column."""

from recurl.columns.constants import take_constants
from recurl.columns.narrow import Narrow, put_together, take_apart
from recurl.columns.rewriting import WIDEST, by_columns, loop_by_columns

__all__ = ["WIDEST", "Narrow", "by_columns", "loop_by_columns", "put_together", "take_apart", "take_constants"]
