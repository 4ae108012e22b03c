"""Command lines of ``recurl`` in forked processes, which start without imports and can be killed."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

# Lazy imports of a run: imported here once, so that no fork has to.
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401 - see above
import tensorboard.compat.proto.event_pb2
import tensorboard.summary.writer.record_writer  # noqa: F401 - see above

from recurl.cli import evaluate, export, main, train  # noqa: F401 - see above

LONGEST = 120.0
MOST_LINES = 3


class Broken(AssertionError):
    """Violation of a guarantee.

    Args:
        what: the attacked operation.
        text: description of the violation.
    """

    def __init__(self, what: str, text: str) -> None:
        super().__init__(text)
        self.what = what


class Command:
    """Running command line.

    Args:
        words: arguments of ``recurl``.
        log: path prefix of its output: ``<log>.out`` and ``<log>.err``.
        before: called first in the forked process.
    """

    def __init__(self, words: Sequence[object], log: Path, before: Callable[[], None] = lambda: None) -> None:
        self.words = [str(word) for word in words]
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(before)
        self.code: int | None = None

    def _run(self, before: Callable[[], None]) -> NoReturn:
        code = 70
        try:
            os.setsid()
            for descriptor, path in ((1, self._out), (2, self._err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644), descriptor)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            before()
            code = main(self.words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001 - tracebacks are what the attacks look for
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal and wait for the process to end."""
        os.kill(self.pid, number)
        self.wait()

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def ends_within(self, seconds: float) -> bool:
        """Wait for the process for at most ``seconds``; return whether it ended."""
        deadline = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.code is not None

    def wait(self, longest: float = LONGEST) -> int:
        """Return the exit code; -9 if the process hung and was killed."""
        if not self.ends_within(longest):
            self.kill()
        assert self.code is not None
        return self.code

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._err.read_text(errors="replace")

    def refusal(self) -> str | None:
        """Return why the refusal isn't a proper one, or None: it must have status 2 and a short error message."""
        lines = [line for line in self.err.splitlines() if not line.startswith("Notice: ")]
        if self.code != 2 or "Traceback" in self.err + self.out:
            return f"exit status {self.code}: {' | '.join(lines[-2:])[-300:]}"
        if not 0 < len(lines) <= MOST_LINES or not lines[0].startswith("recurl: "):
            return f"{len(lines)} lines of errors"
        return None

    def orphans(self, longest: float = 10.0) -> list[int]:
        """Return the processes of its session that are still alive after ``longest`` seconds."""
        deadline = time.monotonic() + longest
        while (left := [pid for pid in _processes() if _session(pid) == self.pid]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _session(pid: int) -> int | None:
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[3])
