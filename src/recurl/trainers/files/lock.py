"""Folder lock: only one process at a time may write, and the lock is released when the process ends."""

from __future__ import annotations

import errno
import json
import os
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from recurl.core.errors import LockedError
from recurl.core.untrusted import open_regular_descriptor
from recurl.trainers.files.durable import writing
from recurl.trainers.files.owner import OwnerFile, this_process

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["LOCK_FILES", "FolderLock"]

_LOCK, _OWNER = ".lock", ".owner"
LOCK_FILES = (_LOCK, _OWNER)
"""Names of the lock files, which don't count as content of the folder."""
_HELD_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


class FolderLock:
    """Exclusive lock for writing to a folder.

    Uses an operating system lock on the file ``.lock`` in the folder, which is never removed. The system releases the
    lock when the process ends, for whatever reason, and child processes don't inherit it. If the file system doesn't
    support locks, a file ``.owner`` that names the process is used instead.

    Args:
        folder: the folder; it must exist when the lock is acquired.
        notify: called with a notice if the file system doesn't support locks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     first, second = (FolderLock(Path(name), print) for _ in range(2))
        ...     with first.hold(), first.hold():
        ...         try:
        ...             with second.hold():
        ...                 pass
        ...         except LockedError as error:
        ...             print(str(error)[:15])
        Another process
    """

    def __init__(self, folder: Path, notify: Callable[[str], None]) -> None:
        self._folder = folder
        self._notify = notify
        self._depth = 0
        self._descriptor: int | None = None
        self._owner: OwnerFile | None = None
        _LOCKS.add(self)

    @contextmanager
    def hold(self) -> Generator[None]:
        """Context manager that holds the lock; reentrant for the same object.

        Raises:
            LockedError: if another process, or another object in this process, holds the lock.
            StorageError: if the folder can't be written.
        """
        if self._depth == 0:
            with writing(self._folder):
                self._acquire()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._release()

    def _acquire(self) -> None:
        path = self._folder / _LOCK
        while True:
            descriptor = open_regular_descriptor(path, os.O_RDWR | os.O_CREAT)
            locks = _try_lock(descriptor, self._folder)
            if _is_same_file(path, descriptor):
                break
            os.close(descriptor)  # the folder was removed and created again in the meantime
        self._descriptor = descriptor
        if not locks:
            self._acquire_owner_file()
        if os.fstat(descriptor).st_nlink > 1:  # a hard link to another file, whose content must not change
            return
        with suppress(OSError):  # only used in error messages
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, json.dumps(this_process()).encode())

    def _acquire_owner_file(self) -> None:
        self._notify(
            f"The file system of {self._folder} doesn't support locks: the file {_OWNER} in it names the process that "
            "uses the folder; remove that file if the process no longer exists."
        )
        self._owner = OwnerFile(self._folder / _OWNER, _lock)
        try:
            self._owner.take()
        except BaseException:
            self._owner = None
            self._release()
            raise

    def _release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.release()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                if fcntl is not None:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if a child process has a copy
            os.close(descriptor)

    def _close_inherited(self) -> None:
        """Close the copy of the descriptor in a forked child; the lock stays with the parent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._owner = None, None


def _try_lock(descriptor: int, folder: Path) -> bool:
    """Lock an open file, and close it on failure; return whether the file system supports locks.

    Raises:
        LockedError: if another process holds the lock.
    """
    try:
        _lock(descriptor)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        text = os.read(descriptor, 400).decode(errors="replace")
        os.close(descriptor)
        if error.errno in _HELD_BY_ANOTHER:
            raise LockedError(_refusal(text, folder)) from None
        raise
    return True


def _lock(descriptor: int) -> None:
    if fcntl is None:
        raise OSError(errno.ENOSYS, "file locks are not supported")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _refusal(text: str, folder: Path) -> str:
    try:
        owner = json.loads(text)
        holder = f"Another process (pid {owner['pid']} on {owner['host']})"
    except (ValueError, TypeError, KeyError):  # it hasn't written its id yet
        holder = "Another process"
    return f"{holder} is using {folder}: wait until it ends, stop it, or use another folder."


_LOCKS: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for lock in list(_LOCKS):
        lock._close_inherited()  # pyright: ignore[reportPrivateUsage] - same module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
