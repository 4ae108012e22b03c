"""Graphs of operations whose narrow tensors are computed column by column."""

from recurl.columns.rewriting import WIDEST, by_columns

__all__ = ["WIDEST", "by_columns"]
