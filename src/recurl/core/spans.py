"""Named profiling spans of an update, inactive unless a :class:`Spans` block is entered.

Time is attributed to the innermost open span, so the times of all spans, including the rest, add up to the total.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

__all__ = [
    "ACTING",
    "ADVANTAGES",
    "BACKWARD",
    "COLLECTION",
    "COLLECTION_GRAPH",
    "ENVIRONMENT",
    "FORWARD",
    "FORWARD_AND_BACKWARD",
    "GRADIENT_GRAPH",
    "LEARNING",
    "OPTIMIZER",
    "PARTS",
    "REPLAY",
    "REST",
    "STATISTICS",
    "TRANSFERS",
    "WAITING",
    "Spans",
    "measured",
    "span",
]

ACTING, ENVIRONMENT, TRANSFERS, COLLECTION = "acting", "environment", "transfers", "other collection"
COLLECTION_GRAPH, WAITING = "collection (one program)", "waiting for the batch"
REPLAY, ADVANTAGES, FORWARD, BACKWARD, OPTIMIZER = "replay", "advantages", "forward", "backward", "optimiser"
FORWARD_AND_BACKWARD, GRADIENT_GRAPH = "forward and backward (one program)", "update (one CUDA graph)"
LEARNING, STATISTICS, REST = "other learning", "statistics", "rest"
PARTS = (
    ACTING,
    ENVIRONMENT,
    TRANSFERS,
    COLLECTION_GRAPH,
    WAITING,
    COLLECTION,
    STATISTICS,
    REPLAY,
    ADVANTAGES,
    FORWARD,
    BACKWARD,
    FORWARD_AND_BACKWARD,
    OPTIMIZER,
    GRADIENT_GRAPH,
    LEARNING,
    REST,
)
"""Names of all spans, in the order of an update."""

_A = TypeVar("_A")
_R = TypeVar("_R")
_NOTHING = nullcontext()
_active: Spans | None = None


class Spans:
    """Context manager that measures the spans of the thread that created it.

    On the CPU, times are those of the host clock. On a GPU, they are times between events of the current stream, so
    they include waits for the host. Spans inside a CUDA graph can't be distinguished.

    Args:
        device: device of the measured work.

    Example:
        >>> with Spans(torch.device("cpu")) as spans, span(ACTING):
        ...     time.sleep(0.01)
        >>> list(spans.seconds()), spans.seconds()[ACTING] >= 0.01
        (['rest', 'acting'], True)
    """

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], Any] = time.perf_counter if device.type != "cuda" else _event
        self._thread = threading.get_ident()
        self._open = [REST]
        self._marks: list[tuple[str, Any]] = []  # the span that ended or was interrupted, and the time

    def __enter__(self) -> Spans:
        global _active
        assert _active is None, "spans are already being measured"
        self._begin = self._mark()
        _active = self
        return self

    def __exit__(self, *error: object) -> None:
        global _active
        _active = None
        self._marks.append((REST, self._mark()))

    @contextmanager
    def open(self, name: str) -> Generator[None]:
        """Measure the block as span ``name``."""
        self._marks.append((self._open[-1], self._mark()))
        self._open.append(name)
        try:
            yield
        finally:
            self._marks.append((self._open.pop(), self._mark()))

    @property
    def counts(self) -> bool:
        """Whether the calling thread is measured; False during CUDA graph capture."""
        if threading.get_ident() != self._thread:
            return False
        return self._mark is not _event or not torch.cuda.is_current_stream_capturing()

    def seconds(self) -> dict[str, float]:
        """Return the time of each span in seconds, by name; they add up to the time of the block."""
        if isinstance(self._begin, torch.cuda.Event):
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        before = self._begin
        for name, mark in self._marks:
            found[name] = found.get(name, 0.0) + _between(before, mark)
            before = mark
        return found


def span(name: str) -> AbstractContextManager[None]:
    """Return a context manager that measures its block as ``name`` if measurement is active."""
    return _NOTHING if _active is None or not _active.counts else _active.open(name)


def measured(name: str, function: Callable[[_A], _R]) -> Callable[[_A], _R]:
    """Return ``function``, wrapped to measure its calls as ``name`` if measurement is active."""
    if _active is None or not _active.counts:
        return function

    def call(argument: _A) -> _R:
        with span(name):
            return function(argument)

    return call


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(before: Any, after: Any) -> float:
    return before.elapsed_time(after) / 1e3 if isinstance(before, torch.cuda.Event) else after - before
