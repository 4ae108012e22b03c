"""Notices: one line each, on the error stream; tracebacks in files."""

from __future__ import annotations

import sys
import tempfile


def notify(text: str) -> None:
    """Print a notice to the error stream."""
    print(f"Notice: {text}", file=sys.stderr)


def keep_trace(trace: str) -> str:
    """Write a traceback to a file, and return its name."""
    with tempfile.NamedTemporaryFile("w", prefix="recurl-traceback-", suffix=".txt", delete=False) as file:
        file.write(trace)
    return file.name
