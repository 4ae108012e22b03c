"""Linear recurrences: :func:`linear_recurrence` over segments and the reverse recurrence of discounted sums."""

from recurl.recurrence.built_in import LINEAR
from recurl.recurrence.linear.operator import linear_recurrence
from recurl.sequences.reverse import reverse_linear_recurrence

__all__ = ["LINEAR", "linear_recurrence", "reverse_linear_recurrence"]
