"""Gated matrix recurrences: :func:`gated_matrix_recurrence` over segments."""

from recurl.recurrence.backend import MATRIX
from recurl.recurrence.matrix.operator import gated_matrix_recurrence

__all__ = ["MATRIX", "gated_matrix_recurrence"]
