"""One-line notices on standard error, and tracebacks saved to files."""

from __future__ import annotations

import sys
import tempfile


def notify(text: str) -> None:
    """Print a notice to standard error."""
    print(f"Notice: {text}", file=sys.stderr)


def save_traceback(trace: str) -> str:
    """Write a traceback to a temporary file and return its name."""
    with tempfile.NamedTemporaryFile("w", prefix="recurl-traceback-", suffix=".txt", delete=False) as file:
        file.write(trace)
    return file.name
