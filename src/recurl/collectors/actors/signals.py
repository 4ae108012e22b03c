"""Signal handling that leaves no Ray processes behind."""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn

__all__ = ["signals_deferred"]

_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def signals_deferred() -> Generator[list[int]]:
    """Defer Ctrl-C, SIGTERM and SIGHUP until the end of the block, in which Ray is started or shut down.

    An exception inside would crash Ray or leave its processes behind. After the block, a SIGTERM or SIGHUP that would
    terminate this process immediately first raises KeyboardInterrupt, so that Ray is shut down, and then terminates the
    process. Signals that this process ignores, as Ctrl-C under ``nohup``, stay ignored. Ray's own handler, which would
    drain its node for half a minute, is not registered. In threads other than the main one, where signals raise
    nothing, this has no effect.

    Yields:
        The signals received so far.

    Example:
        >>> with signals_deferred() as received:
        ...     received
        []
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    register, before = signal.signal, {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}

    def record(number: int, _: object) -> None:
        if number not in received:
            received.append(number)

    def register_others(number: int, handler: Any) -> Any:
        return before[number] if number in before else register(number, handler)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            register(number, record)
    signal.signal = register_others
    try:
        yield received
    finally:
        signal.signal = register
        for number, handler in before.items():
            ends = number in _ENDING and handler is signal.SIG_DFL
            register(number, _interrupt if ends else handler)
        for number in received:
            signal.raise_signal(number)


def _interrupt(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    atexit.register(signal.raise_signal, number)  # so that the exit status is that of the signal
    raise KeyboardInterrupt  # Ray turns any other exception into SystemExit(1)
