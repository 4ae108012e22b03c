"""Programs started as forks of one interpreter that has already imported their modules, which takes seconds.

For tests of a program's behavior. Tests of its imports or environment variables start a new interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
_MOST_BYTES = 1 << 17


class Programs:
    """Interpreter that forks into programs."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        boot = f"from tests.programs import serve; serve({theirs.fileno()})()"
        options = {"pass_fds": (theirs.fileno(),), "stdin": subprocess.DEVNULL, "process_group": 0}
        with theirs:
            root = Path(__file__).parents[1]
            self._process = subprocess.Popen([sys.executable, "-c", boot], cwd=root, **options)

    def Popen(self, command: Sequence[object], **options: Any) -> Program:
        """Like ``subprocess.Popen`` for a command that begins with ``sys.executable`` and -c, -m or a script."""
        return Program(self, list(map(str, command)), **options)

    def run(
        self, command: Sequence[object], *, capture_output: bool = False, check: bool = False, **options: Any
    ) -> subprocess.CompletedProcess:
        """As ``subprocess.run``."""
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) if capture_output else {}
        with self.Popen(command, **pipes, **options) as program:
            out, err = program.communicate()
        done = subprocess.CompletedProcess(command, program.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def fork(self, command: list[str], cwd: Any, env: Any, descriptors: list[int]) -> int:
        """Start a program and return its process id. The last descriptor gets its wait status."""
        wanted = {"command": command[1:], "cwd": os.path.abspath(cwd or "."), "env": dict(env or os.environ)}
        socket.send_fds(self._control, [json.dumps(wanted).encode()], descriptors)
        return int(self._control.recv(_MOST_BYTES))

    def end(self) -> None:
        """End the interpreter; running programs continue."""
        self._control.close()
        self._process.wait()


class Program(subprocess.Popen):
    """A program that the interpreter has started and waits for."""

    def __init__(self, programs: Programs, command: list[str], **options: Any) -> None:
        self._programs = programs
        super().__init__(command, **options)

    def _execute_child(self, args, executable, before, close, passed, cwd, env, info, flags, shell, *rest) -> None:
        pipes = rest[:6]
        self._status, status = os.pipe()
        given = [0 if pipes[0] < 0 else pipes[0], 1 if pipes[3] < 0 else pipes[3], 2 if pipes[5] < 0 else pipes[5]]
        self.pid = self._programs.fork(args, cwd, env, [*given, status])
        self._child_created = True
        os.close(status)
        self._close_pipe_fds(*pipes)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = int(os.read(self._status, 16))
        os.close(self._status)
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


def serve(control: int) -> Callable[[], None]:
    """Fork into programs; return, in each of them, the function that runs it."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    del sys.path[0]  # the current folder
    connection = socket.socket(fileno=control)
    while True:
        data, descriptors, *_ = socket.recv_fds(connection, _MOST_BYTES, 4)
        _forget_those_that_ended()
        if not data:
            os._exit(0)
        if not os.fork():
            break
        for descriptor in descriptors:
            os.close(descriptor)
    pid = os.fork()
    if pid:
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        connection.send(str(pid).encode())
        connection.close()
        os.write(descriptors[3], str(os.waitpid(pid, 0)[1]).encode())
        os._exit(0)
    connection.close()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    wanted = json.loads(data)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    tempfile.tempdir = None  # the environment may differ
    return lambda: _run(*wanted["command"])


def _forget_those_that_ended() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _run(first: str, *rest: str) -> None:
    """Run a command line without its interpreter."""
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")
