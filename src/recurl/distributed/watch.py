"""Watch over the other ranks: if one dies, fails or hangs, this process exits with a message that names it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

__all__ = ["Watch"]

_POLL_SECONDS = 0.5  # between two polls
_DEAD_SECONDS = 10.0  # silence after which a rank on another machine counts as dead
_VERDICT_SECONDS = 13.0  # time that a failed collective waits for a verdict
_GRACE = 5.0  # time for a failed rank to exit by itself
_FAILED, _VERDICT = "failed", "verdict"
_RELAY_SECONDS = 4 * _POLL_SECONDS
_SAME_SECONDS = 4 * _POLL_SECONDS  # after another rank has failed, time for this one to fail with the same error
_STATUS = 2


class _Beat(NamedTuple):
    """Heartbeat of a rank.

    Attributes:
        number: sequence number of the beat.
        progress: number of steps that the rank has completed.
        exempt: whether the rank is exempt from the timeout.
        ended: whether the rank has left the group.
        host: host name.
        pid: process id.
    """

    number: int
    progress: int
    exempt: bool
    ended: bool
    host: str
    pid: int


class _Peer:
    """Latest beat of a rank, and the times of its last changes."""

    def __init__(self, beat: _Beat, now: float, *, near: bool) -> None:
        self.beat = beat
        self.beat_time = self.progress_time = now
        self.near = near

    def update(self, beat: _Beat, now: float) -> None:
        if beat.number != self.beat.number:
            self.beat_time = now
        if beat.progress != self.beat.progress or beat.exempt:
            self.progress_time = now
        self.beat = beat


class Watch:
    """Thread that publishes this rank's progress to the other ranks, and ends the process if one of them is lost.

    A collective that waits for a lost rank can't be interrupted, so the process exits immediately (``os._exit``), with
    status 2 and one line on stderr. Files that are written atomically stay intact.

    Args:
        connect: opens a separate connection to a store shared by all ranks.
        rank: rank of this process.
        size: number of ranks.
        host: host of the store, for the message if it is gone.
    """

    current: ClassVar[Watch | None] = None
    """The watch of this process, if it has one."""

    def __init__(self, connect: Callable[[], Any], rank: int, size: int, host: str) -> None:
        self._connect, self._rank, self._size, self._host = connect, rank, size, host
        self._own = _Beat(0, 0, exempt=True, ended=False, host=socket.gethostname(), pid=os.getpid())
        self._lock = threading.Lock()
        self._peers: dict[int, _Peer] = {}
        self._timeout = float("inf")
        self._failed: str | None = None
        self._has_failed = threading.Event()
        self._reported = threading.Event()
        self._stopped = threading.Event()
        self._is_first = True
        self._polls = 0
        self._thread = threading.Thread(target=self._run, name="recurl-watch", daemon=True)

    def start(self) -> None:
        """Start the thread; there is no timeout until :meth:`arm`, but ranks that die are detected."""
        Watch.current = self
        self._thread.start()
        threading.Thread(target=self._monitor_store, name="recurl-watch-store", daemon=True).start()

    def stop(self) -> None:
        """Inform the other ranks that this one has left, and end the thread."""
        self._change(ended=True)
        self._stopped.set()
        self._thread.join(_VERDICT_SECONDS)
        Watch.current = None

    def _change(self, **values: Any) -> None:
        with self._lock:
            self._own = self._own._replace(**values)

    @classmethod
    def arm(cls, seconds: float) -> None:
        """Start the timeout: end the process if a rank makes no progress for ``seconds``."""
        if cls.current is not None:
            cls.current._timeout = seconds
            cls.current._change(exempt=False, progress=cls.current._own.progress + 1)

    @classmethod
    def progress(cls) -> None:
        """Record that this rank has completed a step; all ranks make the same steps."""
        if cls.current is not None:
            cls.current._change(progress=cls.current._own.progress + 1)

    @classmethod
    @contextmanager
    def exempt(cls) -> Generator[None]:
        """Suspend the timeout for this rank inside the block."""
        watch = cls.current
        if watch is None:
            yield
            return
        before = watch._own.exempt
        watch._change(exempt=True)
        try:
            yield
        finally:
            watch._change(exempt=before)

    @classmethod
    def report(cls, text: str) -> bool:
        """Report the failure of this rank to the others; return False if another rank reported one before."""
        watch = cls.current
        if watch is None:
            return True
        with watch._lock:
            if watch._failed is None:
                watch._failed = text
        watch._has_failed.set()
        watch._reported.wait(_GRACE)
        watch._stopped.wait(_RELAY_SECONDS)  # the store may be hosted by this rank
        return watch._is_first

    @classmethod
    def await_verdict(cls) -> None:
        """Give the thread time to determine why a collective failed, and to end the process."""
        if cls.current is not None:
            cls.current._reported.wait(_VERDICT_SECONDS)

    # -- the thread

    def _run(self) -> None:
        try:
            store = self._connect()
            while not (self._stopped.is_set() or self._reported.is_set()):
                self._poll(store)
                self._polls += 1
                self._stopped.wait(_POLL_SECONDS)
            if not self._reported.is_set():
                self._send(store)
            elif not self._stopped.wait(_GRACE):  # without the store: its calls would not survive interpreter shutdown
                os._exit(_STATUS)
        except Exception as error:  # noqa: BLE001 - a lost connection may raise any error
            if not self._stopped.is_set() and self._failed is None:
                self._end(f"{self._host} is gone ({str(error).partition(chr(10))[0]}).")

    def _monitor_store(self) -> None:
        """End the process if the store doesn't answer: calls block if its host is stopped or unreachable."""
        polls, silent = 0, 0.0
        while not (self._stopped.wait(_POLL_SECONDS) or self._reported.is_set()):
            polls, silent = self._polls, silent + _POLL_SECONDS if polls == self._polls else 0.0
            if silent > self._timeout:
                self._end(f"{self._host} has not answered for {self._timeout:g} s (--rank-timeout).")

    def _poll(self, store: Any) -> None:
        self._send(store)
        if self._failed is not None:
            self._report_failure(store)
        elif store.check([_FAILED]):
            report = json.loads(store.get(_FAILED))
            if self._has_failed.wait(_SAME_SECONDS):
                self._is_first = False
                self._reported.set()
                return
            self._end(f"rank {report['rank']} has failed: {report['text']}")
        elif store.check([_VERDICT]):
            self._end(store.get(_VERDICT).decode())
        now = time.monotonic()
        for rank, beat in self._beats(store):
            if rank not in self._peers:
                self._peers[rank] = _Peer(beat, now, near=beat.host == self._own.host and _alive(beat.pid))
            self._peers[rank].update(beat, now)
        verdict = None if self._failed is not None else self._judge(now)
        if verdict is not None and not self._stopped.is_set():
            agreed = store.compare_set(_VERDICT, "", verdict).decode()
            self._end(agreed, after=_RELAY_SECONDS)

    def _send(self, store: Any) -> None:
        with self._lock:
            self._own = self._own._replace(number=self._own.number + 1)
            own = self._own
        store.set(_key(self._rank), json.dumps(own))

    def _report_failure(self, store: Any) -> None:
        own = json.dumps({"rank": self._rank, "text": self._failed})
        self._is_first = store.compare_set(_FAILED, "", own).decode() == own
        self._reported.set()

    def _beats(self, store: Any) -> Iterable[tuple[int, _Beat]]:
        for rank in range(self._size):
            if store.check([_key(rank)]):
                yield rank, _Beat(*json.loads(store.get(_key(rank))))

    def _judge(self, now: float) -> str | None:
        """Return the reason why this process must end, or None."""
        running = {rank: seen for rank, seen in self._peers.items() if not seen.beat.ended}
        for rank, seen in running.items():
            dead = not _alive(seen.beat.pid) if seen.near else now - seen.beat_time > _DEAD_SECONDS
            if dead and rank != self._rank:
                where = f"its process, {seen.beat.pid} on {seen.beat.host}, is gone"
                return f"rank {rank} has died ({where})."
        if len(self._peers) < self._size or any(seen.beat.exempt for seen in running.values()):
            for seen in running.values():
                seen.progress_time = now
            return None
        behind = min((seen.beat.progress for seen in running.values()), default=0)
        slow = [rank for rank, seen in running.items() if seen.beat.progress == behind]
        if slow and all(now - running[rank].progress_time > self._timeout for rank in slow):
            subject = "no rank" if len(slow) == len(running) > 1 else f"rank {', '.join(map(str, slow))}"
            status = "made progress" if subject == "no rank" else "made no progress"
            return f"{subject} has {status} for {self._timeout:g} s (--rank-timeout)."
        return None

    def _end(self, text: str, *, after: float = 0.0) -> None:
        with suppress(OSError):
            os.write(2, f"recurl: rank {self._rank} ends, as {text}\n".encode())
        time.sleep(after)
        os._exit(_STATUS)


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _alive(pid: int) -> bool:
    with suppress(OSError):  # a zombie process can still be signaled
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
