"""Processes of workers: a new interpreter imports the library once, and forks into the workers of a group.

Nothing but imports has run in that interpreter: it has no threads, no device and nothing of the parent's, so its forks
are as good as interpreters of their own, which would each take the seconds of these imports and the memory of what they
load.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple, cast

from recurl.envs.workers_child import BEATS, ENDED, PID, STATUS_SIZE, numbers

__all__ = ["Ends", "Interpreter", "Process"]

_BOOT = "import sys; sys.path[:] = {path!r}; from recurl.envs.workers_child import fork; fork({ends!r}, {modules!r})"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # seconds


class Ends(NamedTuple):
    """File descriptors of a worker: the socket to the parent, and the status file."""

    connection: int
    status: int


class Interpreter:
    """New interpreter that forks into one worker for each of ``ends``, and ends after them.

    Args:
        ends: the workers' file descriptors, which the caller may close afterwards.
        modules: names of modules to import before the forks.

    Attributes:
        pid: its process id, and that of its process group.
    """

    def __init__(self, ends: Sequence[Ends], modules: Collection[str]) -> None:
        path = [entry for entry in cast("list[object]", sys.path) if isinstance(entry, str)]  # as imports do
        boot = _BOOT.format(path=path, ends=[tuple(pair) for pair in ends], modules=sorted(modules))
        self._process = subprocess.Popen(
            [sys.executable, "-c", boot], pass_fds=tuple(chain(*ends)), stdin=subprocess.DEVNULL, process_group=0
        )
        self._left = len(ends)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill it, and what it has forked that has no process group of its own yet."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def release(self) -> None:
        """Take note that another one of its workers has ended; it is of no more use after the last."""
        self._left -= 1
        if self._left == 0:
            self.kill()


class Process:
    """The process of one worker, whose parent is the interpreter.

    Args:
        interpreter: the interpreter that forks.
        status: file descriptor of the worker's status file, owned by this object from now on.
    """

    def __init__(self, interpreter: Interpreter, status: int) -> None:
        self._interpreter = interpreter
        self._file = status
        self._status = numbers(status)
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

    def kill_group(self) -> None:
        """Kill the process and its children, or what is left of them."""
        if not self._status[PID] and self.returncode is None:
            self._interpreter.kill()  # the worker begins no more, unless it just has
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Forget about the process, which has ended."""
        self._last = self.pid, self.returncode
        del self._status
        os.close(self._file)
        self._interpreter.release()
