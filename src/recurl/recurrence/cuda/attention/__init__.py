"""Windowed attention on a GPU."""
