"""Worker processes: the worker's side."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NamedTuple, NoReturn, Self

import cloudpickle
import torch

from recurl.core import errors
from recurl.core.errors import RecurlError, RemoteTraceback, WorkerError
from recurl.core.seeding import seed_everything
from recurl.envs.registrations import register_all
from recurl.envs.workers_memory import Entry, SharedTensors

__all__ = [
    "BEATS",
    "ENDED",
    "FAILED",
    "PID",
    "STATUS_SIZE",
    "VALUE",
    "Channel",
    "Closed",
    "Failure",
    "fork_on_request",
    "status_fields",
]

VALUE, FAILED = b"v", b"f"
STATUS_SIZE = 4096
"""Offset of faulthandler's output in the status file, which starts with 8-byte integer fields."""

BEATS, PID, ENDED = range(3)
"""Indices of the status fields: step count, process id of the worker, and wait status of its exit plus 1."""

_GRACE_SECONDS = 2.0
_PARENT_POLL_MS = 2000  # how often a process checks that its parent is alive
_CLOSED_POLL_MS = 100  # likewise, once the parent has closed its connection


class Failure(NamedTuple):
    """Exception raised in another process, as text."""

    kind: str | None
    """Class name of a recurl error; None for any other error."""
    summary: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Describe a caught error."""
        kind, own = type(error).__name__, isinstance(error, RecurlError)
        message = str(error) if own else next((line for line in str(error).splitlines() if line.strip()), "")
        text = "".join(traceback.format_exception(error))
        return cls(kind if own else None, f"{kind}: {message}" if message else kind, text)

    def error(self, where: object) -> Exception:
        """Return the error to raise in this process, with the remote traceback as its cause.

        Args:
            where: the other process, for the message.
        """
        kind = WorkerError if self.kind is None else getattr(errors, self.kind, WorkerError)
        error = kind(f"{where} raised {self.summary}")
        error.__cause__ = RemoteTraceback(self.traceback)
        return error


class Closed(Exception):
    """Raised when the parent closed its end of the connection or told the worker to exit."""


class Channel:
    """Worker's end of the connection to the parent.

    Args:
        connection: socket to the parent.
        status: file descriptor of the status file.
    """

    def __init__(self, connection: Connection, status: int) -> None:
        self._connection = connection
        self._status = status_fields(status)

    def beat(self) -> None:
        """Count a step, so that the parent knows the worker isn't hung."""
        self._status[BEATS] += 1

    def receive_bytes(self) -> bytes:
        """Return the parent's next message.

        Raises:
            Closed: the parent is gone.
        """
        try:
            return self._connection.recv_bytes()
        except (EOFError, ConnectionError) as error:
            raise Closed from error

    def send(self, value: Any = None) -> None:
        """Send a reply to the parent.

        Raises:
            Closed: the parent is gone.
        """
        self._send(VALUE if value is None else VALUE + pickle.dumps(value))

    def fail(self, error: BaseException) -> None:
        """Send ``error``, with its traceback, as the reply."""
        self._send(FAILED + pickle.dumps(Failure.of(error)))

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except ConnectionError as error:
            raise Closed from error

    @property
    def descriptor(self) -> int:
        """File descriptor of the connection, for polling."""
        return self._connection.fileno()

    def receive_descriptor(self) -> int:
        """Receive a file descriptor from the parent.

        Raises:
            Closed: the parent is gone.
        """
        try:
            return recv_handle(self._connection)
        except (EOFError, ConnectionError) as error:
            raise Closed from error

    def share(self, entries: list[Entry]) -> SharedTensors:
        """Create shared memory and send it to the parent, which must be waiting for it."""
        shared = SharedTensors(entries)
        shared.send(self._connection)
        shared.close()
        return shared

    def receive_memory(self, entries: tuple[Entry, ...]) -> SharedTensors:
        """Receive shared memory from the parent."""
        return SharedTensors.receive(self._connection, entries)


def fork_on_request(control: int, program: int, modules: Sequence[str]) -> None:
    """Fork workers until the program closes its end of the socket, and return when all of them have exited.

    Once the program has exited, even if a fork of it keeps the socket open, workers that don't exit by themselves, such
    as one stopped by SIGSTOP, are killed.

    Args:
        control: file descriptor of a socket on which the program sends two descriptors per worker: the socket between
            program and worker, and the status file.
        program: process id of the program, the parent of this process.
        modules: names of modules to import first.
    """
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # garbage collections in the workers then don't touch memory shared with this process
    interpreter, running = os.getpid(), dict[int, memoryview]()
    requests, (ended, wake) = socket.socket(fileno=control), os.pipe()
    for descriptor in (ended, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, the signal would not wake the poller
    signal.set_wakeup_fd(wake)
    poller = select.poll()
    for descriptor in (control, ended):
        poller.register(descriptor, select.POLLIN)
    is_open = True
    while (is_open or running) and os.getppid() == program:
        for descriptor, _ in poller.poll(_PARENT_POLL_MS if is_open else _CLOSED_POLL_MS):
            if descriptor == ended:
                os.read(ended, 4096)
                _record_exits(running)
                continue
            _, given, *_ = socket.recv_fds(requests, 1, 2)
            if not given:
                is_open = False
                poller.unregister(control)
                continue
            connection, status = given
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                os.close(ended)
                os.close(wake)
                running.clear()  # drops the status files of the other workers
                _main(connection, status, interpreter)
            running[pid] = status_fields(status)
            for descriptor in given:
                os.close(descriptor)
    _reap(running)


def _reap(running: dict[int, memoryview]) -> None:
    """Wait for workers to exit by themselves, and kill those that don't."""
    end = time.monotonic() + _GRACE_SECONDS
    while running and time.monotonic() < end:
        time.sleep(_CLOSED_POLL_MS / 1000)
        _record_exits(running)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _record_exits(running: dict[int, memoryview]) -> None:
    """Record the exit of workers in their status files."""
    for pid in list(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            running.pop(pid)[ENDED] = status + 1


def status_fields(status: int) -> memoryview:
    """Return the integer fields of a status file, in memory shared between processes."""
    return memoryview(mmap.mmap(status, STATUS_SIZE)).cast("q")


def _main(connection: int, status: int, parent: int) -> NoReturn:
    """Serve the program until it closes the connection, then exit the process.

    The first message is ``(registered, seed, serve, arguments)``: ``serve(channel, *arguments)`` runs with the
    program's environments registered and the global generators seeded.

    Args:
        connection: file descriptor of the socket to the program.
        status: file descriptor of the status file.
        parent: process id of the interpreter, the parent of this process.
    """
    status_fields(status)[PID] = os.getpid()  # before leaving the group, so that killing by group or by pid finds it
    os.setpgid(0, 0)
    for descriptor in (connection, status):
        os.set_inheritable(descriptor, False)
    os.lseek(status, STATUS_SIZE, os.SEEK_SET)
    faulthandler.enable(status, all_threads=False)
    faulthandler.register(signal.SIGUSR1, status, all_threads=False)
    threading.Thread(target=_end_with_parent, args=(connection, parent), daemon=True).start()
    torch.set_num_threads(1)
    channel = Channel(Connection(connection), status)
    code = 0
    try:
        registered, seed, serve, arguments = cloudpickle.loads(channel.receive_bytes())
        register_all(registered)
        seed_everything(seed)
        serve(channel, *arguments)
    except Closed:
        pass
    except BaseException as error:  # noqa: BLE001 - raised in the parent
        code = 1
        with contextlib.suppress(Closed):
            channel.fail(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without waiting for threads of the environment


def _end_with_parent(connection: int, parent: int) -> None:
    """Exit the process once the parent is gone, regardless of the main thread."""
    poller = select.poll()
    poller.register(connection, 0)  # a hang-up is always reported
    while not poller.poll(_PARENT_POLL_MS) and os.getppid() == parent:
        pass
    time.sleep(_GRACE_SECONDS)  # the main thread may be closing its environment
    os.killpg(0, signal.SIGKILL)  # this process and those started by its environment
