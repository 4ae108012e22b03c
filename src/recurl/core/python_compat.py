"""Private names of CPython used by recurl, each with its purpose and a fallback if it disappears."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from types import FrameType
from typing import Any, cast

from recurl.core.private_names import find

__all__ = ["ForkServer", "is_import_statement", "running_loop"]


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


running_loop: Callable[[], asyncio.AbstractEventLoop | None] = find("asyncio:_get_running_loop", _running_loop)
"""Return the event loop of this thread, or None.

Fallback: ``asyncio.get_running_loop``, which is slower as it raises an error outside of a loop.
"""

_IMPORT_FROM: int | None = find("opcode:opmap", {}).get("IMPORT_FROM")


def is_import_statement(frame: FrameType | None) -> bool:
    """Return whether a frame is executing a ``from ... import ...``, from its bytecode.

    Fallback: False.
    """
    return frame is not None and frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM


class ForkServer(forkserver.ForkServer):
    """Fork server that can be ended, and that neither its children nor forks of the program keep running.

    Each process that has the write end of the server's "alive" pipe keeps it running: the program, its forks, and by
    default the children. Fallback: it runs until all of these have exited.
    """

    @property
    def pid(self) -> int:
        """Process id; 0 if it isn't running."""
        return getattr(self, "_forkserver_pid", None) or 0

    def end(self) -> None:
        """Kill the server."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # it may be importing
            with suppress(FileNotFoundError):  # at exit, multiprocessing may have removed its folder already
                cast(Any, self)._stop()

    def leave(self: Any) -> None:
        """Stop keeping the server running, in a fork of the program or in a child of the server."""
        descriptor = getattr(self, "_forkserver_alive_fd", None)
        if descriptor is not None:
            os.close(descriptor)
            self._forkserver_alive_fd = None

    @staticmethod
    def inherited() -> list[int]:
        """Leave the server, in a child of it, and return the file descriptors that were passed to this child."""
        ForkServer.leave(getattr(forkserver, "_forkserver", None))
        return forkserver.get_inherited_fds() or []
