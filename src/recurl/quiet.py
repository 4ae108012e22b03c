"""Output of other libraries, held back."""

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
    """Hold back what a logger says below ``level``, inside the block.

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
    """Hold back what the process writes to stderr inside the block, code in C++ included; drop it if the block raises.

    Compilers print their state for pages before they fail, below Python, where no logger can be set. Of a block that
    succeeds, the output follows at its end.

    Example:
        >>> import sys
        >>> with quiet_if_failing():
        ...     print("at the end", file=sys.stderr)
    """
    try:
        before = os.dup(_STDERR)
    except OSError:  # there is no stderr
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
