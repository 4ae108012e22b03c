"""Watch over the other ranks: one that has died, failed or hangs ends this process too, with a line that names it."""

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

_SECONDS = 0.5  # between two looks
_SILENT = 10.0  # of a rank on another machine that is taken for dead
_LONGEST = 13.0  # that a failed collective waits for a reason
_GRACE = 5.0  # of a rank that has failed, to end by itself
_FAILED, _VERDICT = "failed", "verdict"
_TO_BE_HEARD = 4 * _SECONDS
_STATUS = 2


class _Beat(NamedTuple):
    """What a rank says of itself.

    Attributes:
        number: of the beat.
        progress: how far it has come.
        exempt: whether it may take as long as it likes.
        ended: whether it has left the group.
        host: its machine.
        pid: its process.
    """

    number: int
    progress: int
    exempt: bool
    ended: bool
    host: str
    pid: int


class _Seen:
    """The latest beat of a rank, and when it changed."""

    def __init__(self, beat: _Beat, now: float, *, near: bool) -> None:
        self.beat = beat
        self.heard = self.moved = now
        self.near = near

    def update(self, beat: _Beat, now: float) -> None:
        if beat.number != self.beat.number:
            self.heard = now
        if beat.progress != self.beat.progress or beat.exempt:
            self.moved = now
        self.beat = beat


class Watch:
    """A thread that tells the other ranks how far this one is, and ends the process where one of them is lost.

    A collective that waits for a rank that never comes can't be interrupted: the process ends at once (``os._exit``),
    with status 2 and one line on the error stream. Files that are written whole or not at all stay as they were.

    Args:
        connect: makes a connection of its own to a store that all ranks share.
        rank: number of this process.
        size: number of processes.
        host: who hosts the store, for the message when it is gone.
    """

    current: ClassVar[Watch | None] = None
    """The watch of this process, if it has one."""

    def __init__(self, connect: Callable[[], Any], rank: int, size: int, host: str) -> None:
        self._connect, self._rank, self._size, self._host = connect, rank, size, host
        self._own = _Beat(0, 0, exempt=True, ended=False, host=socket.gethostname(), pid=os.getpid())
        self._lock = threading.Lock()
        self._seen: dict[int, _Seen] = {}
        self._timeout = float("inf")
        self._failed: str | None = None
        self._told = threading.Event()
        self._over = threading.Event()
        self._first = True
        self._looks = 0
        self._thread = threading.Thread(target=self._run, name="recurl-watch", daemon=True)

    def start(self) -> None:
        """Begin; until :meth:`arm` a rank may take as long as it likes, but not die."""
        Watch.current = self
        self._thread.start()
        threading.Thread(target=self._await_looks, name="recurl-watch-store", daemon=True).start()

    def stop(self) -> None:
        """Tell the others that this rank has left, and end the thread."""
        self._change(ended=True)
        self._over.set()
        self._thread.join(_LONGEST)
        Watch.current = None

    def _change(self, **values: Any) -> None:
        with self._lock:
            self._own = self._own._replace(**values)

    @classmethod
    def arm(cls, seconds: float) -> None:
        """From now on end where a rank has made no progress for so many seconds."""
        if cls.current is not None:
            cls.current._timeout = seconds
            cls.current._change(exempt=False, progress=cls.current._own.progress + 1)

    @classmethod
    def progress(cls) -> None:
        """Note that this rank has come a step further; all ranks make the same steps."""
        if cls.current is not None:
            cls.current._change(progress=cls.current._own.progress + 1)

    @classmethod
    @contextmanager
    def exempt(cls) -> Generator[None]:
        """Let the block take as long as it likes."""
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
        """Tell the others that this rank fails; return False where another one said so before."""
        watch = cls.current
        if watch is None:
            return True
        with watch._lock:
            if watch._failed is None:
                watch._failed = text
        watch._told.wait(_GRACE)
        watch._over.wait(_TO_BE_HEARD)  # the store may be this rank's, and end with it
        return watch._first

    @classmethod
    def await_verdict(cls) -> None:
        """Give the thread the time to find out why a collective failed, and to end the process."""
        if cls.current is not None:
            cls.current._told.wait(_LONGEST)

    # -- the thread

    def _run(self) -> None:
        try:
            store = self._connect()
            while not (self._over.is_set() or self._told.is_set()):
                self._look(store)
                self._looks += 1
                self._over.wait(_SECONDS)
            if not self._told.is_set():
                self._send(store)
            elif not self._over.wait(_GRACE):  # without the store: a call of it would not outlive the interpreter
                os._exit(_STATUS)
        except Exception as error:  # noqa: BLE001 - whatever a lost connection raises
            if not self._over.is_set() and self._failed is None:
                self._end(f"{self._host} has gone ({str(error).partition(chr(10))[0]}).")

    def _await_looks(self) -> None:
        """End where the store doesn't answer: a call of it waits for a host that is stopped or cut off."""
        looks, silent = 0, 0.0
        while not (self._over.wait(_SECONDS) or self._told.is_set()):
            looks, silent = self._looks, silent + _SECONDS if looks == self._looks else 0.0
            if silent > self._timeout:
                self._end(f"{self._host} has not answered for {self._timeout:g} s (--rank-timeout).")

    def _look(self, store: Any) -> None:
        self._send(store)
        if self._failed is not None:
            self._tell(store)
        elif store.check([_FAILED]):
            said = json.loads(store.get(_FAILED))
            self._end(f"rank {said['rank']} has failed: {said['text']}")
        elif store.check([_VERDICT]):
            self._end(store.get(_VERDICT).decode())
        now = time.monotonic()
        for rank, beat in self._beats(store):
            if rank not in self._seen:
                self._seen[rank] = _Seen(beat, now, near=beat.host == self._own.host and _alive(beat.pid))
            self._seen[rank].update(beat, now)
        verdict = None if self._failed is not None else self._judge(now)
        if verdict is not None and not self._over.is_set():
            agreed = store.compare_set(_VERDICT, "", verdict).decode()
            self._end(agreed, after=_TO_BE_HEARD)

    def _send(self, store: Any) -> None:
        with self._lock:
            self._own = self._own._replace(number=self._own.number + 1)
            own = self._own
        store.set(_key(self._rank), json.dumps(own))

    def _tell(self, store: Any) -> None:
        own = json.dumps({"rank": self._rank, "text": self._failed})
        self._first = store.compare_set(_FAILED, "", own).decode() == own
        self._told.set()

    def _beats(self, store: Any) -> Iterable[tuple[int, _Beat]]:
        for rank in range(self._size):
            if store.check([_key(rank)]):
                yield rank, _Beat(*json.loads(store.get(_key(rank))))

    def _judge(self, now: float) -> str | None:
        """Return why this process must end, or None."""
        running = {rank: seen for rank, seen in self._seen.items() if not seen.beat.ended}
        for rank, seen in running.items():
            dead = not _alive(seen.beat.pid) if seen.near else now - seen.heard > _SILENT
            if dead and rank != self._rank:
                where = f"its process, {seen.beat.pid} on {seen.beat.host}, is gone"
                return f"rank {rank} has died ({where})."
        if len(self._seen) < self._size or any(seen.beat.exempt for seen in running.values()):
            for seen in running.values():
                seen.moved = now
            return None
        behind = min((seen.beat.progress for seen in running.values()), default=0)
        slow = [rank for rank, seen in running.items() if seen.beat.progress == behind]
        if slow and all(now - running[rank].moved > self._timeout for rank in slow):
            who = "no rank" if len(slow) == len(running) > 1 else f"rank {', '.join(map(str, slow))}"
            said = "made progress" if who == "no rank" else "made no progress"
            return f"{who} has {said} for {self._timeout:g} s (--rank-timeout)."
        return None

    def _end(self, text: str, *, after: float = 0.0) -> None:
        with suppress(OSError):
            os.write(2, f"recurl: rank {self._rank} ends, as {text}\n".encode())
        time.sleep(after)
        os._exit(_STATUS)


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _alive(pid: int) -> bool:
    with suppress(OSError):  # a process that nobody has waited for yet can still be signalled
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
