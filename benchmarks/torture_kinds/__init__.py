"""The kinds of attacks of ``benchmarks/torture.py``, one in each module."""
