"""Notices: one line each, on the error stream."""

from __future__ import annotations

import sys


def notify(text: str) -> None:
    """Print a notice to the error stream."""
    print(f"Notice: {text}", file=sys.stderr)
