"""Worker processes: a new interpreter imports the library once and forks the workers of a group.

Only imports have run in that interpreter: it has no threads, no device, and none of the parent's state. Its forks are
thus equivalent to separate interpreters, each of which would spend seconds on imports and memory on loaded modules.
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
    """New interpreter that forks workers. It exits after them, once this process has exited.

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
        """Exit code; None while the interpreter runs."""
        return self._process.poll()

    def fork(self, connection: int, status: int) -> Process:
        """Request a new worker and return its process, which may not have started yet.

        Args:
            connection: file descriptor of the worker's socket to this process; it may be closed after this call.
            status: file descriptor of the worker's status file.
        """
        with contextlib.suppress(ConnectionError):  # the interpreter has exited, and so has the worker
            socket.send_fds(self._control, [b"f"], [connection, status])
        return Process(self, status)

    def end(self) -> None:
        """Kill the interpreter, whose workers have exited, and forks of it that haven't started yet."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()


class Process:
    """Process of one worker, a child of the interpreter.

    Args:
        interpreter: the interpreter that forks the process.
        status: file descriptor of the worker's status file; this object takes ownership.
    """

    def __init__(self, interpreter: Interpreter, status: int) -> None:
        self._interpreter = interpreter
        self._file = status
        self._status = status_fields(status)
        self._last: tuple[int, int | None] | None = None

    @property
    def pid(self) -> int:
        """Process id; the interpreter's before the fork."""
        return self._last[0] if self._last else self._status[PID] or self._interpreter.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs or if the exit code is lost."""
        if self._last:
            return self._last[1]
        interpreter = self._interpreter.returncode  # read before the status that the interpreter writes
        if self._status[ENDED]:
            return os.waitstatus_to_exitcode(self._status[ENDED] - 1)
        return None if self._status[PID] else interpreter

    @property
    def beats(self) -> int:
        """Number of steps that the worker has counted."""
        return self._status[BEATS]

    @property
    def stack(self) -> str:
        """Output of faulthandler: the worker's stack when it crashed or received SIGUSR1."""
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
        """Wait for the process to exit and return the exit code; None if it isn't available after ``seconds``."""
        end, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while self.returncode is None and self._interpreter.returncode is None and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self.returncode

    def kill(self) -> None:
        """Kill the process and its remaining children, and wait for its exit.

        A process that hasn't started yet will exit by itself when it finds its connection closed.
        """
        if self._status[PID]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(_KILL_SECONDS)

    def close(self) -> None:
        """Release the resources of the process, which has exited."""
        self._last = self.pid, self.returncode
        del self._status
        os.close(self._file)
