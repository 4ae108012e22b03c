"""Windowed attention: :func:`windowed_attention` over segments, with stored windows where they start."""

from recurl.recurrence.attention.operator import windowed_attention
from recurl.recurrence.built_in import ATTENTION

__all__ = ["ATTENTION", "windowed_attention"]
