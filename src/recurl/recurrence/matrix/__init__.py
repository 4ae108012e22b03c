"""Gated matrix recurrences: :func:`gated_matrix_recurrence` over segments."""

from recurl.recurrence.built_in import MATRIX
from recurl.recurrence.matrix.operator import gated_matrix_recurrence

__all__ = ["MATRIX", "gated_matrix_recurrence"]
