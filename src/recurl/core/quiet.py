"""Suppression of the output of other libraries."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["quiet", "quiet_if_failing"]

_STDERR = 2


@contextmanager
def quiet(logger: str, level: int) -> Generator[None]:
    """Suppress messages of a logger below ``level`` inside the block.

    Example:
        >>> with quiet("noisy", logging.ERROR):
        ...     logging.getLogger("noisy").warning("never seen")
    """
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def quiet_if_failing() -> Generator[None]:
    """Buffer the process's stderr, including that of C++ code, inside the block; discard it if the block raises.

    Compilers may print pages of internal state before they fail, below Python's logging. If the block succeeds, the
    output is written at its end.

    Example:
        >>> import sys
        >>> with quiet_if_failing():
        ...     print("at the end", file=sys.stderr)
    """
    try:
        before = os.dup(_STDERR)
    except OSError:  # no stderr
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(before, _STDERR)
            os.close(before)
        held.seek(0)
        os.write(_STDERR, held.read())
