"""Lookup of the line of user code behind a call stack, for error messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary

import numpy as np
import torch

__all__ = ["line_of"]

_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, np))


def line_of(frames: Sequence[FrameSummary], *others: str) -> str | None:
    """Return the location and the code of the innermost frame outside torch, NumPy and the files ``others``.

    Example:
        >>> line_of([FrameSummary("train.py", 7, "step", line="loss.item()")])
        'train.py:7 does `loss.item()`'
    """
    for frame in reversed(frames):
        if not frame.filename.startswith((*_LIBRARIES, *others)):
            return f"{frame.filename}:{frame.lineno} does `{frame.line}`"
    return None
