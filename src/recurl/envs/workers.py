"""Worker processes: the parent's side.

Workers are forked from a server, never from the parent, and don't import the parent's main module, so scripts need no
``if __name__ == "__main__"`` guard. Control messages go through a socket, data through shared memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import read_signed
from multiprocessing.reduction import send_handle
from typing import Any, NamedTuple, cast

import torch

from recurl.core.errors import ArgumentError, RemoteTraceback, UsageError, WorkerError
from recurl.core.python_compat import ForkServer
from recurl.envs.pickling import pickled
from recurl.envs.registrations import Registration, registrations
from recurl.envs.workers_child import FAILED, STATUS_SIZE, VALUE, Failure, Start, status_fields
from recurl.envs.workers_memory import Entry, SharedTensors, anonymous_file, check_posix

__all__ = [
    "CLOSE",
    "SERVER",
    "START_SECONDS",
    "Process",
    "Reply",
    "Worker",
    "WorkerGroup",
    "WorkerServer",
    "WorkerTask",
]

_KILL_SECONDS = 60.0


class WorkerServer(ForkServer):
    """Server that forks workers, shared by all groups of this program; it ends with the last of them.

    It is the fork server of the standard library, in an instance of its own: the one of ``multiprocessing`` belongs to
    the program, which may have started it with other modules and another environment.
    """

    def __init__(self) -> None:
        super().__init__()
        self._users = 0
        self._guard = threading.RLock()  # a garbage collection may release the server anywhere

    def acquire(self, modules: Collection[str]) -> None:
        """Add a user. The first one names the modules that the server imports before it forks."""
        with self._guard:
            if self._users == 0:
                self.set_forkserver_preload(sorted(modules))
            self._users += 1

    def release(self) -> None:
        """Remove a user, whose workers have exited. The last one ends the server."""
        with self._guard:
            self._users -= 1
            if self._users == 0:
                self.end()

    def fork(self, descriptors: list[int]) -> int:
        """Request a new worker, which gets copies of ``descriptors``.

        Returns:
            File descriptor from which the worker's process id and then its exit code can be read.
        """
        path = [entry for entry in cast("list[object]", sys.path) if isinstance(entry, str)]  # as imports do
        sys.path, before = path, sys.path  # the command line of a new server can't have other entries
        try:
            self.ensure_running()
        finally:
            sys.path = before
        reported, data = self.connect_to_new_process(descriptors)
        preparation = {"sys_path": path, "dir": os.getcwd()}  # without the main module, which isn't imported then
        with contextlib.suppress(BrokenPipeError), open(data, "wb") as file:
            file.write(pickle.dumps(preparation) + pickle.dumps(Start(dict(os.environ))))
        return reported

    def forget(self) -> None:
        """Leave the server to the program, in a fork of it."""
        self.leave()
        self.__init__()


SERVER = WorkerServer()
if hasattr(os, "register_at_fork"):  # a POSIX system
    os.register_at_fork(after_in_child=SERVER.forget)


class Process:
    """Process of one worker, a child of the server.

    Args:
        server: the server.
        connection: file descriptor of the worker's socket to this process; it may be closed after this call.
    """

    def __init__(self, server: WorkerServer, connection: int) -> None:
        self._server = server
        self._file = anonymous_file(STATUS_SIZE)
        self._status = status_fields(self._file)
        self._numbers: list[int] = []  # process id and exit code
        self._reported: int | None = None
        with contextlib.suppress(ConnectionError):  # the server has exited, and so has the worker
            self._reported = server.fork([connection, self._file])
        self.closed = False

    def _read(self, count: int, seconds: float = 0.0) -> list[int]:
        """Wait for the server to report ``count`` numbers, and return those that it has reported."""
        end = time.monotonic() + seconds
        while self._reported is not None and len(self._numbers) < count:
            if not wait([self._reported], max(0.0, end - time.monotonic())):
                break
            try:
                self._numbers.append(read_signed(self._reported))
            except EOFError:  # the server has exited
                self._end()
        return self._numbers

    def _end(self) -> None:
        if self._reported is not None:
            os.close(self._reported)
            self._reported = None

    @property
    def pid(self) -> int:
        """Process id; the server's before the fork."""
        return (self._read(1) or [self._server.pid])[0]

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs or if the exit code is lost."""
        return self.wait(0.0)

    @property
    def beats(self) -> int:
        """Number of steps that the worker has counted."""
        return self._status[0]

    @property
    def stack(self) -> str:
        """Output of faulthandler: the worker's stack when it crashed or received SIGUSR1."""
        size = os.fstat(self._file).st_size - STATUS_SIZE
        return os.pread(self._file, size, STATUS_SIZE).decode(errors="replace") if size > 0 else ""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs."""
        if len(self._read(2)) == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds: float) -> int | None:
        """Wait for the process to exit and return the exit code; None if it isn't available after ``seconds``."""
        return dict(enumerate(self._read(2, seconds))).get(1)

    def kill(self) -> None:
        """Kill the process and its remaining children, and wait for its exit.

        A process that hasn't started yet will exit by itself when it finds its connection closed.
        """
        if self._read(1):
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has exited, or not begun a group yet
                self.send_signal(signal.SIGKILL)
            self.wait(_KILL_SECONDS)

    def close(self) -> None:
        """Release the resources of the process, which has exited."""
        self._end()
        self.closed = True
        del self._status
        os.close(self._file)


START_SECONDS = 120.0

"""Time limit for a worker's imports and the creation of its environment, in seconds."""

CLOSE = pickle.dumps(("close",))

"""Message that tells a worker to exit."""

_CLOSE_SECONDS = 5.0

_SEND_SECONDS = 0.5

_MAX_SECONDS = 1e9  # seconds

_POLL_MS = 200


class WorkerTask(NamedTuple):
    """Task of a worker: ``serve(channel, *arguments)``, where ``serve`` is a function of an importable module."""

    serve: Callable[..., None]
    arguments: tuple[Any, ...]


class Reply(NamedTuple):
    """Reply of a worker, or the error that it raised or that terminated it."""

    worker: int
    value: Any
    error: Exception | None


class Worker:
    """One worker process.

    Args:
        index: index of the worker, for messages.
        server: the server that the worker is forked from.

    Attributes:
        connection: socket to the worker. Reads and writes time out when the worker hangs.
        process: the process, leader of its own process group.
        asked: time of the last request, on the monotonic clock.
    """

    def __init__(self, index: int, server: WorkerServer) -> None:
        self.index = index
        self._socket, theirs = socket.socketpair()
        self._stalled = False
        with theirs:
            self.process = Process(server, theirs.fileno())
        self.asked = self._last_activity = time.monotonic()
        self._last_beat, self._time_limit = self.process.beats, START_SECONDS
        self.connection = Connection(os.dup(self._socket.fileno()))
        self._limit: float | None = None
        self._started = False

    def ask(self, message: bytes, seconds: float | None) -> None:
        """Send a request. After ``seconds`` without a reply or step (None: no limit), the worker is considered hung."""
        self.expect(time.monotonic(), seconds)
        if seconds != self._limit:
            self._limit = seconds
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, _timeval(seconds))
        self._use_socket(self.connection.send_bytes, message)

    def expect(self, asked: float, seconds: float | None) -> None:
        """Register a request made at time ``asked``, with a limit of ``seconds`` without a reply or a step."""
        self.asked = self._last_activity = asked
        self._time_limit = math.inf if seconds is None else seconds

    def send_descriptor(self, descriptor: int) -> None:
        """Send a file descriptor to the worker, which must be waiting for it."""
        self._use_socket(send_handle, self.connection, descriptor, None)

    def send_memory(self, shared: SharedTensors) -> None:
        """Send shared memory to the worker, which must be waiting for it."""
        self._use_socket(shared.send, self.connection)

    def receive_memory(self, entries: Sequence[Entry]) -> SharedTensors | None:
        """Receive shared memory that the worker announced; on failure return None, and the next reply has the error."""
        shared: SharedTensors | None = self._use_socket(SharedTensors.receive, self.connection, entries)
        if shared is not None:
            shared.close()
        return shared

    def _use_socket(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that reads or writes the socket. Failures are reported with the worker's next reply."""
        if self._stalled:
            return None
        try:
            return function(*arguments)
        except BlockingIOError:  # the worker stopped in the middle of a message
            self._stalled = True
        except (EOFError, OSError):  # the worker is dead
            pass
        return None

    def receive(self) -> Reply:
        """Return the worker's reply, which must be available."""
        self._last_activity = time.monotonic()
        try:
            message = self.connection.recv_bytes()
        except BlockingIOError:  # the worker stopped in the middle of a message
            return Reply(self.index, None, self._hang_error())
        except (EOFError, OSError):
            return Reply(self.index, None, self._exit_error())
        if message[:1] == FAILED:
            failure: Failure = pickle.loads(message[1:])
            return Reply(self.index, None, failure.error(self))
        assert message[:1] == VALUE
        self._started = True
        return Reply(self.index, pickle.loads(message[1:]) if len(message) > 1 else None, None)

    def check_hanging(self) -> Exception | None:
        """Return an error if the worker has neither replied nor taken a step within its time limit, else None.

        Also return an error if the worker has exited, because a fork by its environment may keep the connection open.
        """
        if self.process.returncode is not None and not self.connection.poll():
            return self._exit_error()
        now = time.monotonic()
        if self.process.beats != self._last_beat:
            self._last_beat, self._last_activity = self.process.beats, now
        return self._hang_error() if self._stalled or now - self._last_activity > self._time_limit else None

    def _hang_error(self) -> Exception:
        self.process.send_signal(signal.SIGUSR1)  # makes faulthandler write the worker's stack
        end = time.monotonic() + 0.5
        while not self.process.stack and time.monotonic() < end:
            time.sleep(0.02)
        advice = (
            "If a step of its environment may take longer, raise the limit: --env-timeout, or timeout= in Python."
            if self._started
            else "Its imports and the creation of its environment may not take longer."
        )
        text = f"{self} hangs: no answer and no step for {self._time_limit:g} s. {advice}"
        return _with_traceback(WorkerError(text), self.process.stack)

    def _exit_error(self) -> Exception:
        code = self._wait(2.0)
        if code is None:
            return WorkerError(f"{self} closed its connection.")
        if code >= 0:
            return WorkerError(f"{self} exited with code {code}; its output may show the reason.")
        hint = ", possibly by the system because memory ran out" if -code == signal.SIGKILL else ""
        error = WorkerError(f"{self} was killed by {signal.Signals(-code).name}{hint}.")
        return _with_traceback(error, self.process.stack)

    def stop(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the process to exit, kill it otherwise, and release its resources; idempotent."""
        if self.process.closed:
            return
        if self._wait(seconds) is None:
            self.process.kill()
        self.process.close()
        self.connection.close()
        self._socket.close()

    def _wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if the process is still running after ``seconds``; kill remaining children."""
        code = self.process.wait(seconds)
        if code is not None:
            self.process.kill()
        return code

    def __str__(self) -> str:
        return f"Worker {self.index} (process {self.process.pid})"


class WorkerGroup:
    """Group of worker processes.

    All workers are stopped when the group is closed or garbage-collected, or when the interpreter exits. Workers exit
    by themselves when the parent dies. A fork of the parent can't use them and doesn't stop them.

    Args:
        tasks: one task per worker.
        timeout: seconds that a worker may take for one step (including the policy) or reset; None for no limit.

    Raises:
        ArgumentError: ``timeout`` is not positive.
        ArgumentTypeError: a task can't be pickled.
        UnsupportedError: the system is not POSIX.
        WorkerError: a worker failed to start.
        RecurlError: an error of recurl was raised in a worker while it started.
    """

    def __init__(self, tasks: Sequence[WorkerTask], timeout: float | None) -> None:
        check_posix()
        if timeout is not None and not timeout > 0:  # also rejects NaN
            raise ArgumentError(f"timeout must be positive, or None for no limit, got {timeout}.")
        self.timeout = timeout
        self.tasks = list(tasks)
        registered = registrations()
        messages = [self._first_message(task, registered) for task in tasks]
        self.workers: list[Worker] = []
        self._owner = os.getpid()
        # Modules other than recurl's might start threads, which don't survive a fork.
        self._server = SERVER
        names = (Start.__module__, *(task.serve.__module__ for task in tasks))
        self._server.acquire({name for name in names if name.startswith("recurl.")})
        self._stop = weakref.finalize(self, _stop_all, self.workers, self._server, self._owner)
        self._poller = select.poll()
        self._by_descriptor: dict[int, int] = {}
        try:
            for index in range(len(tasks)):
                self.workers.append(Worker(index, self._server))
                self._watch(self.workers[-1])
            for worker, message in zip(self.workers, messages, strict=True):
                worker.ask(message, START_SECONDS)
            self.greetings = self.answers(range(len(tasks)))
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _first_message(task: WorkerTask, registered: list[Registration]) -> bytes:
        seed = int(torch.randint(2**62, ()))  # different for each worker, and determined by the parent's seed
        pickled("create_env_fn", task.arguments[0])  # so that an error names the unpicklable part
        return pickled("the worker's task", (registered, seed, *task))

    def _watch(self, worker: Worker) -> None:
        self._by_descriptor[worker.connection.fileno()] = worker.index
        self._poller.register(worker.connection.fileno(), select.POLLIN)

    @property
    def descriptors(self) -> dict[int, int]:
        """Worker indices by the file descriptors of their sockets."""
        return self._by_descriptor

    def ask(self, index: int, message: bytes, *, makes_envs: bool = False) -> None:
        """Send a request to a worker. With ``makes_envs`` the time limit allows for the creation of environments."""
        longest = None if self.timeout is None else max(self.timeout, START_SECONDS)
        self.workers[index].ask(message, longest if makes_envs else self.timeout)

    def ask_all(self, *message: Any) -> None:
        """Send the same request to every worker."""
        for index in range(len(self.workers)):
            self.ask(index, pickle.dumps(message))

    def next_reply(self, pending: Collection[int]) -> Reply:
        """Wait for a reply or failure of one of the ``pending`` workers, preferring the oldest request."""
        found = self._ready(pending)
        return found if isinstance(found, Reply) else min(found, key=lambda worker: worker.asked).receive()

    def replies(self, pending: Collection[int], should_stop: Callable[[], bool] = lambda: False) -> list[Reply]:
        """Wait for a reply or failure of one of the ``pending`` workers, and return all available replies.

        Return an empty list once ``should_stop()``, which is polled a few times per second, is true.
        """
        found = self._ready(pending, should_stop)
        return [found] if isinstance(found, Reply) else [worker.receive() for worker in found]

    def _ready(self, pending: Collection[int], should_stop: Callable[[], bool] = lambda: False) -> list[Worker] | Reply:
        """Wait until workers have replied or died and return them, or return the error of a worker that hangs."""
        while not should_stop():
            ready = [self.workers[self._by_descriptor[found]] for found, _ in self._poller.poll(_POLL_MS)]
            if ready:
                return ready
            for index in pending:
                error = self.workers[index].check_hanging()
                if error is not None:
                    return Reply(index, None, error)
        return []

    def answers(self, indices: Collection[int]) -> list[Any]:
        """Wait for the replies of these workers and return them in index order. On an error, all workers are stopped.

        Raises:
            WorkerError: a worker raised an error, died, or hangs.
            RecurlError: a worker raised an error of recurl; it is re-raised with the same class.
        """
        pending = set(indices)
        values: dict[int, Any] = {}
        try:
            while pending:
                for reply in self.replies(pending):
                    if reply.error is not None:
                        raise reply.error
                    pending.discard(reply.worker)
                    values[reply.worker] = reply.value
        except BaseException:  # including interrupts: outstanding replies would be mistaken for later ones
            self.kill()
            raise
        return [values[index] for index in sorted(values)]

    def send_memory(self, index: int, shared: SharedTensors) -> None:
        """Send shared memory to a worker that is waiting for it."""
        self.workers[index].send_memory(shared)

    def receive_memory(self, index: int, entries: Sequence[Entry]) -> SharedTensors | None:
        """Receive shared memory that a worker announced; on failure return None, and the next reply has the error."""
        return self.workers[index].receive_memory(entries)

    def restart(self, index: int) -> None:
        """Replace a worker with a new process, without waiting for its first reply."""
        message = self._first_message(self.tasks[index], registrations())
        self.end(index)
        self.workers[index] = Worker(index, self._server)
        self._watch(self.workers[index])
        self.workers[index].ask(message, START_SECONDS)

    def end(self, index: int) -> None:
        """Stop a worker immediately; it can't be used anymore unless it is restarted."""
        worker = self.workers[index]
        self._poller.unregister(worker.connection.fileno())
        del self._by_descriptor[worker.connection.fileno()]
        worker.stop(0)

    @property
    def closed(self) -> bool:
        """Whether the workers were stopped."""
        return not self._stop.alive

    def check_open(self) -> None:
        """Check that the workers are running and belong to this process.

        Raises:
            UsageError: the workers were stopped, or this process is a fork of the one that started them.
        """
        if self.closed:
            raise UsageError("The worker processes were stopped, by close() or after a failure: create a new object.")
        if os.getpid() != self._owner:
            raise UsageError(
                f"Worker processes belong to the process that started them, {self._owner}, and this one, "
                f"{os.getpid()}, is a fork of it: create a new object here."
            )

    def close(self) -> None:
        """Tell the workers to close their environments and exit; kill those still running after 5 s."""
        if not self.closed:
            self._stop.detach()
            if os.getpid() != self._owner:
                return
            for worker in self.workers:
                worker.ask(CLOSE, _SEND_SECONDS)
            _stop_all(self.workers, self._server, self._owner, _CLOSE_SECONDS)

    def kill(self) -> None:
        """Stop all workers immediately."""
        self._stop()


def _stop_all(workers: list[Worker], server: WorkerServer, owner: int, seconds: float = 0.0) -> None:
    if os.getpid() != owner:  # in a fork of the parent; the parent keeps its workers
        return
    end = time.monotonic() + seconds
    for worker in workers:
        worker.stop(end - time.monotonic())
    workers.clear()
    server.release()


def _with_traceback(error: Exception, text: str) -> Exception:
    if text:
        error.__cause__ = RemoteTraceback(text)
    return error


def _timeval(seconds: float | None) -> bytes:
    """Return a time limit in the format of ``setsockopt``; None for no limit."""
    microseconds = 0 if seconds is None else max(int(min(seconds, _MAX_SECONDS) * 1e6), 1)
    return struct.pack("ll", *divmod(microseconds, 10**6))
