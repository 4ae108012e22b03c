"""Where the time of an update goes: named spans of the code, measured only where somebody asks.

Every moment belongs to the innermost span that is open then, so that the times of all spans, and the rest, add up to
the whole.
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
    """Measures spans of the thread that makes it, while its block is entered.

    On the CPU times are those of the host's clock. On a GPU they are the times between events of its current stream, so
    they include its waits for the host; what runs inside a CUDA graph is not told apart.

    Args:
        device: where the work is done.

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
        self._marks: list[tuple[str, Any]] = []  # which span ended, or was interrupted, when

    def __enter__(self) -> Spans:
        global _active
        assert _active is None, "spans are being measured already"
        self._begin = self._mark()
        _active = self
        return self

    def __exit__(self, *error: object) -> None:
        global _active
        _active = None
        self._marks.append((REST, self._mark()))

    @contextmanager
    def open(self, name: str) -> Generator[None]:
        """Measure the block as ``name``."""
        self._marks.append((self._open[-1], self._mark()))
        self._open.append(name)
        try:
            yield
        finally:
            self._marks.append((self._open.pop(), self._mark()))

    @property
    def counts(self) -> bool:
        """Whether the calling thread is measured now; nothing is while a CUDA graph is recorded."""
        if threading.get_ident() != self._thread:
            return False
        return self._mark is not _event or not torch.cuda.is_current_stream_capturing()

    def seconds(self) -> dict[str, float]:
        """Return the time of each span in seconds, by name; together they are the time of the block."""
        if isinstance(self._begin, torch.cuda.Event):
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        before = self._begin
        for name, mark in self._marks:
            found[name] = found.get(name, 0.0) + _between(before, mark)
            before = mark
        return found


def span(name: str) -> AbstractContextManager[None]:
    """Return a block that is measured as ``name``, if somebody measures."""
    return _NOTHING if _active is None or not _active.counts else _active.open(name)


def measured(name: str, function: Callable[[_A], _R]) -> Callable[[_A], _R]:
    """Return ``function`` as it is, or, if somebody measures, with its calls measured as ``name``."""
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
