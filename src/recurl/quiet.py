"""Loggers of other libraries, held back."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["quiet"]


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
