"""What is worth knowing and no error, on one line."""

from __future__ import annotations

import sys


def notify(text: str) -> None:
    """Say ``text`` on the error stream, where results don't go."""
    print(f"Notice: {text}", file=sys.stderr)
