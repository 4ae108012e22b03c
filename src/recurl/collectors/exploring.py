"""The exploration type of the thread that collects."""

from __future__ import annotations

from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import tensordict

from recurl.errors import UnsupportedError
from recurl.mode import ExplorationType, set_exploration_type

__all__ = ["check_thread_explores_alone", "exploring"]

# tensordict 0.14 has one exploration type for all threads.
_OF_THREAD = {"thread_local": True} if "thread_local" in signature(set_exploration_type).parameters else {}


def exploring(kind: ExplorationType) -> AbstractContextManager[Any]:
    """Return a block in which policies act as ``kind`` says; other threads don't see it, if tensordict can do that."""
    return set_exploration_type(kind, **_OF_THREAD)


def check_thread_explores_alone() -> None:
    """Refuse a second thread that acts, where its exploration type would be that of all threads.

    Raises:
        UnsupportedError: tensordict has one exploration type for all threads.
    """
    if not _OF_THREAD:
        raise UnsupportedError(
            f"Collection in a thread needs an exploration type of its own, but tensordict {tensordict.__version__} has "
            "one for all threads. Install tensordict 0.15, or collect in worker processes (MultiSyncCollector)."
        )
