"""Worker processes: the worker's side."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NamedTuple, NoReturn, Self

import cloudpickle
import torch

from recurl.core import errors
from recurl.core.errors import RecurlError, RemoteTraceback, WorkerError
from recurl.core.python_compat import ForkServer
from recurl.core.seeding import seed_everything
from recurl.envs.registrations import register_all
from recurl.envs.workers_memory import Entry, SharedTensors

__all__ = [
    "FAILED",
    "STATUS_SIZE",
    "VALUE",
    "Channel",
    "Closed",
    "Failure",
    "Start",
    "status_fields",
]

VALUE, FAILED = b"v", b"f"
STATUS_SIZE = 4096
"""Offset of faulthandler's output in the status file, which starts with the step count."""

_GRACE_SECONDS = 2.0
_PARENT_POLL_MS = 2000  # how often a process checks that its parent is alive


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
        self._status[0] += 1

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


class Start:
    """Start of a worker in a fork of the server, which calls :meth:`_bootstrap`.

    Args:
        environment: environment variables of the program.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def _bootstrap(self, sentinel: int) -> NoReturn:
        # The server then exits with the program, even if this process is stopped. The kernel continues and hangs up the
        # stopped process, as its process group is orphaned.
        connection, status = ForkServer.inherited()
        os.close(sentinel)
        os.environ.clear()
        os.environ.update(self._environment)
        _main(connection, status, os.getppid())


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
        parent: process id of the server, the parent of this process.
    """
    os.setpgid(0, 0)
    gc.freeze()  # garbage collections then don't touch memory shared with the server
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
