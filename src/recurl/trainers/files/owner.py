"""Owner file: names the process that uses a folder, for file systems without locks."""

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

from recurl.core.errors import LockedError
from recurl.core.untrusted import open_regular_descriptor, read_json

__all__ = ["OwnerFile", "this_process"]

_PROC = Path("/proc")
_LONGEST = 4096


def this_process() -> dict[str, Any]:
    """Return values that identify this process uniquely, as far as the system provides them."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), **_machine(), "start": _start_time(pid)}


def _machine() -> dict[str, str | None]:
    """Return the boot id and PID namespace, within which process ids are comparable; None if unknown."""
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
    """Return whether ``owner`` is known to have ended: a process of this machine and boot that no longer exists."""
    here = this_process()
    same = all(owner.get(name) == here[name] for name in ("host", "boot", "namespace"))
    return same and here["boot"] is not None and _start_time(int(owner["pid"])) != owner.get("start")


class OwnerFile:
    """Lock by file creation; another process takes over the file only if its owner is known to be dead.

    Args:
        path: the file.
        lock: acquires an exclusive system lock on an open descriptor, or raises OSError.
    """

    def __init__(self, path: Path, lock: Callable[[int], None]) -> None:
        self._path = path
        self._lock = lock

    def take(self) -> None:
        """Create the file.

        Raises:
            LockedError: if another process owns it, or may own it.
            OSError: if it can't be created.
        """
        if not self._create() and not (self._remove_stale() and self._create()):
            raise LockedError(
                f"According to {self._path}, {self._describe_owner()} is using this folder: wait for it or stop it; if "
                "that process no longer exists, remove the file."
            )

    def release(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self._path.unlink()

    def _create(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            json.dump(this_process(), file)
        return True

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            owner = read_json(self._path)
            if isinstance(owner, dict) and isinstance(owner.get("pid"), int):
                return owner
        return {}

    def _describe_owner(self) -> str:
        owner = self._read()
        return f"process {owner['pid']} on {owner.get('host')}" if owner else "another process"

    def _remove_stale(self) -> bool:
        """Remove the file of a dead process, one process of this machine at a time."""
        if not self._owner_is_dead():
            return False
        name = hashlib.sha256(str(self._path.resolve()).encode()).hexdigest()[:16]
        guard = Path(tempfile.gettempdir()) / f"recurl-{name}.lock"
        with suppress(OSError), os.fdopen(open_regular_descriptor(guard, os.O_RDWR | os.O_CREAT), "r+b") as file:
            self._lock(file.fileno())
            if self._owner_is_dead():
                self._path.unlink()
                return True
        return False

    def _owner_is_dead(self) -> bool:
        owner = self._read()
        return bool(owner) and _is_dead(owner)
