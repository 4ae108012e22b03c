"""Which line of a user's code does something, for messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary

import numpy as np
import torch

__all__ = ["line_of"]

_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, np))


def line_of(frames: Sequence[FrameSummary], *others: str) -> str | None:
    """Return where the innermost frame is, and what its line does, leaving torch, NumPy and files ``others`` out.

    Example:
        >>> line_of([FrameSummary("train.py", 7, "step", line="loss.item()")])
        'train.py:7 does `loss.item()`'
    """
    for frame in reversed(frames):
        if not frame.filename.startswith((*_LIBRARIES, *others)):
            return f"{frame.filename}:{frame.lineno} does `{frame.line}`"
    return None
