"""Exploration type of the collecting thread."""

from __future__ import annotations

from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import tensordict

from recurl.core.errors import UnsupportedError
from recurl.sequences.mode import ExplorationType, set_exploration_type

__all__ = ["check_thread_explores_alone", "exploring"]

# tensordict 0.14 has one exploration type for all threads.
_OF_THREAD = {"thread_local": True} if "thread_local" in signature(set_exploration_type).parameters else {}


def exploring(kind: ExplorationType) -> AbstractContextManager[Any]:
    """Return a context manager that sets the exploration type, for this thread only if tensordict supports that."""
    return set_exploration_type(kind, **_OF_THREAD)


def check_thread_explores_alone() -> None:
    """Check that exploration types are per thread, as needed for acting in a second thread.

    Raises:
        UnsupportedError: tensordict has one exploration type for all threads.
    """
    if not _OF_THREAD:
        raise UnsupportedError(
            f"Collection in a thread needs a separate exploration type, but tensordict {tensordict.__version__} has "
            "one for all threads. Install tensordict 0.15, or collect in worker processes (MultiSyncCollector)."
        )
