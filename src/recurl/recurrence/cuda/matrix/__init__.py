"""Gated matrix recurrences on a GPU."""
