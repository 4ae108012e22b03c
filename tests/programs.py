"""Commands started in forks of one interpreter that has already imported their modules, which takes seconds.

A fork replaces the start of ``sys.executable`` and nothing else. Tests of imports, environment variables that are read
at the start, and the installed command start a new interpreter.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

_IMPORTED = (
    "recurl.cli.doctor",
    "recurl.cli.evaluate",
    "recurl.cli.sweep",
    "recurl.cli.train",
    "recurl.distributed",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.record_writer",
)

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(list(_IMPORTED))  # one server for all tests of a process; it starts when first used


class Programs:
    """Launcher of programs, with the interface of ``subprocess``."""

    def __init__(self) -> None:
        self._started = list[Program]()

    def Popen(self, command: Sequence[object], **options: Any) -> Program:
        """Start a command that begins with ``sys.executable`` and -c, -m or a script."""
        self._started.append(Program([str(word) for word in command], **options))
        return self._started[-1]

    def run(
        self, command: Sequence[object], *, capture_output: bool = False, check: bool = False, **options: Any
    ) -> subprocess.CompletedProcess:
        """Run a command to its end, as ``subprocess.run``."""
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) if capture_output else {}
        with self.Popen(command, **pipes, **options) as program:
            out, err = program.communicate()
        done = subprocess.CompletedProcess(command, program.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def end(self) -> None:
        """Kill the programs that still run."""
        for program in self._started:
            program.kill()
            program.wait()


class Program:
    """A running command, with the interface of ``subprocess.Popen``."""

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int | IO | None = None,
        stdout: int | IO | None = None,
        stderr: int | IO | None = None,
        text: bool = False,
        cwd: os.PathLike | str | None = None,
        env: dict[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.args = command
        (in_, self.stdin), (out, self.stdout), (err, self.stderr) = (
            _file(number, given, text) for number, given in enumerate((stdin, stdout, stderr))
        )
        variables, folder = dict(os.environ if env is None else env), os.path.abspath(cwd or ".")
        arguments = command[1:], folder, variables, (in_, out, err), start_new_session
        self._process = CONTEXT.Process(target=_run, args=arguments)
        self._process.start()
        for file in (in_, out, err):
            file.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def communicate(self, given: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        texts = dict[int, Any]()
        readers = [
            threading.Thread(target=lambda number=number, file=file: texts.update({number: file.read()}), daemon=True)
            for number, file in enumerate((self.stdout, self.stderr))
            if file is not None
        ]
        for reader in readers:
            reader.start()
        if self.stdin is not None:
            if given is not None:
                self.stdin.write(given)
            self.stdin.close()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self._close()
        return texts.get(0), texts.get(1)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _close(self) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()


def _file(number: int, given: int | IO | None, text: bool) -> tuple[Connection, IO | None]:
    """Return the program's end of a standard stream, and this process's where it is a pipe."""
    if given == subprocess.PIPE:
        ends = os.pipe()
        theirs, ours = ends if number == 0 else ends[::-1]
        file = os.fdopen(ours, ("w" if number == 0 else "r") + ("" if text else "b"), -1 if text or number else 0)
        return Connection(theirs), file
    if given == subprocess.DEVNULL:
        return Connection(os.open(os.devnull, os.O_RDWR)), None
    own = number if given is None else given if isinstance(given, int) else given.fileno()
    return Connection(os.dup(own)), None


def _run(
    command: list[str], folder: str, environment: dict[str, str], files: tuple[Connection, ...], new_session: bool
) -> None:
    """Run a command line, and end the process as an interpreter ends."""
    if new_session:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has closed it
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the environment may differ
    code = 1
    try:
        _execute(*command)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - printed, as by the interpreter
        sys.excepthook(*sys.exc_info())
    ctypes.pythonapi.Py_Exit(code)  # with exit handlers, which multiprocessing skips before Python 3.13


def _execute(first: str, *rest: str) -> None:
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")
