"""Signals that must not leave processes of Ray behind."""

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
    """Hold back Ctrl-C, SIGTERM and SIGHUP inside the block, in which Ray starts or ends; they arrive afterwards.

    An exception in the middle would crash Ray, or leave its processes behind. From then on, a SIGTERM or SIGHUP that
    would end this process at once raises KeyboardInterrupt, so that Ray is shut down, and ends the process after that.
    Ray's own handler, which would drain its node for half a minute, is not registered. In other threads than the main
    one, where signals raise nothing, this does nothing.

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
    register, before = signal.signal, {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}

    def note(number: int, _: object) -> None:
        if number not in came:
            came.append(number)

    def register_none_of_these(number: int, handler: Any) -> Any:
        return before[number] if number in before else register(number, handler)

    for number in before:
        register(number, note)
    signal.signal = register_none_of_these
    try:
        yield came
    finally:
        signal.signal = register
        for number, handler in before.items():
            ends = number in _ENDING and handler is signal.SIG_DFL
            register(number, _interrupt if ends else handler)
        for number in came:
            signal.raise_signal(number)


def _interrupt(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    atexit.register(signal.raise_signal, number)  # the exit status is that of the signal
    raise KeyboardInterrupt  # Ray makes SystemExit(1) of any other exception
