"""Processes of workers: a new interpreter imports the library once, and forks into the workers of a group.

Nothing but imports has run in that interpreter: it has no threads, no device and nothing of the parent's, so its forks
are as good as interpreters of their own, which would each take the seconds of these imports and the memory of what they
load.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from typing import cast

from recurl.envs.workers_child import BEATS, ENDED, PID, STATUS_SIZE, status_fields

__all__ = ["Interpreter", "Process"]

_BOOT = (
    "import sys; sys.path[:] = {path!r}; from recurl.envs.workers_child import fork_on_request; "
    "fork_on_request({control}, {program}, {modules!r})"
)
_KILL_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # seconds


class Interpreter:
    """New interpreter that forks into workers. It ends after them when this process has ended.

    Args:
        modules: names of modules to import before the first fork.
    """

    def __init__(self, modules: Collection[str] = ()) -> None:
        path = [entry for entry in cast("list[object]", sys.path) if isinstance(entry, str)]  # as imports do
        self._control, theirs = socket.socketpair()
        boot = _BOOT.format(path=path, control=theirs.fileno(), program=os.getpid(), modules=sorted(modules))
        with theirs:
            command, given = [sys.executable, "-c", boot], (theirs.fileno(),)
            self._process = subprocess.Popen(command, pass_fds=given, stdin=subprocess.DEVNULL, process_group=0)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def fork(self, connection: int, status: int) -> Process:
        """Return a new worker, on its way.

        Args:
            connection: file descriptor of its socket to this process, which may be closed then.
            status: file descriptor of its status file.
        """
        with contextlib.suppress(ConnectionError):  # it has ended: so has the worker
            socket.send_fds(self._control, [b"f"], [connection, status])
        return Process(self, status)

    def end(self) -> None:
        """End the interpreter, whose workers have ended, and forks of it that have not begun."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()


class Process:
    """The process of one worker, whose parent is the interpreter.

    Args:
        interpreter: the interpreter that forks.
        status: file descriptor of the worker's status file, owned by this object from now on.
    """

    def __init__(self, interpreter: Interpreter, status: int) -> None:
        self._interpreter = interpreter
        self._file = status
        self._status = status_fields(status)
        self._last: tuple[int, int | None] | None = None

    @property
    def pid(self) -> int:
        """Process id; that of the interpreter before the fork."""
        return self._last[0] if self._last else self._status[PID] or self._interpreter.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs, and if nobody is left who knows."""
        if self._last:
            return self._last[1]
        interpreter = self._interpreter.returncode  # before what it wrote
        if self._status[ENDED]:
            return os.waitstatus_to_exitcode(self._status[ENDED] - 1)
        return None if self._status[PID] else interpreter

    @property
    def beats(self) -> int:
        """Number of steps that the worker has counted."""
        return self._status[BEATS]

    @property
    def stack(self) -> str:
        """What faulthandler has written: where the worker was when it crashed, or was asked by SIGUSR1."""
        size = os.fstat(self._file).st_size - STATUS_SIZE
        return os.pread(self._file, size, STATUS_SIZE).decode(errors="replace") if size > 0 else ""

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._last is not None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        """Wait for the end and return the exit code; None if that isn't there after ``seconds``."""
        end, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while self.returncode is None and self._interpreter.returncode is None and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self.returncode

    def kill(self) -> None:
        """Kill the process and its children, or what is left of them; wait for its end.

        One that is still to begin will end by itself, as it finds its connection closed.
        """
        if self._status[PID]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(_KILL_SECONDS)

    def close(self) -> None:
        """Forget about the process, which has ended."""
        self._last = self.pid, self.returncode
        del self._status
        os.close(self._file)
