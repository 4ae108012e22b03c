"""Prefetching of batches in a background thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

__all__ = ["Prefetcher"]

_T = TypeVar("_T")


class Prefetcher(Generic[_T]):
    """Prefetcher: calls a function in a thread so that ``depth`` results are ready or being computed.

    Args:
        make: function that computes one result; calls never overlap.
        depth: number of results to compute in advance.

    Example:
        >>> numbers = iter(range(10))
        >>> prefetcher = Prefetcher(lambda: next(numbers), 2)
        >>> prefetcher.next(), prefetcher.next()
        (0, 1)
    """

    def __init__(self, make: Callable[[], _T], depth: int) -> None:
        self._make = make
        self._depth = depth
        self._lock = threading.Lock()
        self._ahead: deque[Future[_T]] = deque()
        self._thread = ThreadPoolExecutor(1, "recurl-prefetch")

    def next(self) -> _T:
        """Return the next result, or raise the exception raised by ``make``."""
        with self._lock:
            while len(self._ahead) <= self._depth:
                self._ahead.append(self._thread.submit(self._make))
            future = self._ahead.popleft()
        return future.result()

    def discard(self) -> None:
        """Drop all results computed in advance, and wait for a running call."""
        with self._lock:
            wait([future for future in self._ahead if not future.cancel()])
            self._ahead.clear()
