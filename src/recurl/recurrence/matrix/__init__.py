"""Gated matrix recurrences."""
