"""Graceful stop at the next update on Ctrl-C, SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class StopOnSignal:
    """Context manager that records the first Ctrl-C, SIGTERM or SIGHUP; a second one has its usual effect.

    SIGHUP stays ignored if it is ignored already, as under ``nohup``.

    Example:
        >>> with StopOnSignal() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.requested(), stop.exit_code
        (True, 143)
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopOnSignal:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Return whether a signal was received."""
        return self._number is not None

    @property
    def exit_code(self) -> int:
        """Exit code: 128 plus the signal number, or 0 without a signal."""
        return 0 if self._number is None else 128 + self._number
