"""A file that names the process that made it: who holds a folder on a file system without locks."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from recurl.errors import LockedError

__all__ = ["OwnerFile", "this_process"]

_PROC = Path("/proc")


def this_process() -> dict[str, Any]:
    """Return what tells this process from all others, as far as the system says it."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), **_machine(), "start": _start_time(pid)}


def _machine() -> dict[str, str | None]:
    """The boot and the namespace in which process ids mean the same as here; None where the system doesn't say."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "namespace": os.readlink(_PROC / "self/ns/pid")}
    except OSError:
        return {"boot": None, "namespace": None}


def _start_time(pid: int) -> str | None:
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether ``owner`` was a process of this machine, in this boot, and is no more."""
    here = this_process()
    same = all(owner.get(name) == here[name] for name in ("host", "boot", "namespace"))
    return same and here["boot"] is not None and _start_time(int(owner["pid"])) != owner.get("start")


class OwnerFile:
    """Held by the process whose making of the file succeeded; taken over only from one that is known to be dead.

    Args:
        path: the file.
        lock: takes an exclusive lock of the system on an open descriptor, or raises OSError.
    """

    def __init__(self, path: Path, lock: Callable[[int], None]) -> None:
        self._path = path
        self._lock = lock

    def take(self) -> None:
        """Make the file.

        Raises:
            LockedError: another process holds it, or may hold it.
            OSError: it can't be made.
        """
        if not self._make() and not (self._remove_dead() and self._make()):
            raise LockedError(
                f"{self._path} says that {self._named()} works here: wait for it or stop it; if there is no such "
                "process any more, remove that file."
            )

    def release(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self._path.unlink()

    def _make(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            json.dump(this_process(), file)
        return True

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            owner = json.loads(self._path.read_text())
            if isinstance(owner, dict) and isinstance(owner.get("pid"), int):
                return owner
        return {}

    def _named(self) -> str:
        owner = self._read()
        return f"process {owner['pid']} on {owner.get('host')}" if owner else "another process"

    def _remove_dead(self) -> bool:
        """Remove the file of a dead process. Its successors, all of this machine, do so one at a time."""
        if not self._named_dead():
            return False
        name = hashlib.sha256(str(self._path.resolve()).encode()).hexdigest()[:16]
        with suppress(OSError), (Path(tempfile.gettempdir()) / f"recurl-{name}.lock").open("a") as turn:
            self._lock(turn.fileno())
            if self._named_dead():
                self._path.unlink()
                return True
        return False

    def _named_dead(self) -> bool:
        owner = self._read()
        return bool(owner) and _is_dead(owner)
