"""Windowed attention: :func:`windowed_attention` over segments, with stored windows where they start."""

from recurl.recurrence.attention.operator import windowed_attention
from recurl.recurrence.backend import ATTENTION

__all__ = ["ATTENTION", "windowed_attention"]
