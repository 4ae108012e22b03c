"""Notices: one line each, on the error stream; tracebacks in files."""

from __future__ import annotations

import sys
import tempfile

from recurl.distributed import speaks
from recurl.errors import UnsupportedError
from recurl.recurrence import BACKENDS


def notify(text: str) -> None:
    """Print a notice to the error stream."""
    print(f"Notice: {text}", file=sys.stderr)


def notify_if_slow(device: str) -> None:
    """Print a notice if training on ``device`` would be fast only with the C++ library, which is missing."""
    if not (device.startswith("cpu") and speaks()):
        return
    try:
        BACKENDS.check_name("cpu")
    except UnsupportedError as error:
        notify(f"Training on this CPU is several times slower than it could be. {error}")


def keep_trace(trace: str) -> str:
    """Write a traceback to a file, and return its name."""
    with tempfile.NamedTemporaryFile("w", prefix="recurl-traceback-", suffix=".txt", delete=False) as file:
        file.write(trace)
    return file.name
