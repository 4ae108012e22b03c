"""Signals held back while Ray starts or ends: an exception in the middle would crash it, or leave processes behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["signals_deferred"]

_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def signals_deferred() -> Generator[list[int]]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP inside the block; they arrive at its end, in their order.

    Handlers that are registered inside take effect at the end. In other threads than the main one, where Python raises
    nothing, this does nothing.

    Yields:
        The signals that have come so far.

    Example:
        >>> with signals_deferred() as came:
        ...     came
        []
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    register, handlers = signal.signal, {number: signal.getsignal(number) for number in _NUMBERS}

    def note(number: int, _: object) -> None:
        if number not in came:
            came.append(number)

    def register_later(number: int, handler: Any) -> Any:
        if number not in handlers:
            return register(number, handler)
        before, handlers[number] = handlers[number], handler
        return before

    for number in handlers:
        register(number, note)
    signal.signal = register_later
    try:
        yield came
    finally:
        signal.signal = register
        for number, handler in handlers.items():
            if handler is not None:  # registered by C code
                register(number, handler)
        for number in came:
            signal.raise_signal(number)
