"""Attacks of ``benchmarks/torture.py``, one kind per module."""
