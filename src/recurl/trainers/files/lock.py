"""Lock of a folder: one process at a time may write; the lock ends with the process."""

from __future__ import annotations

import errno
import json
import os
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from recurl.errors import LockedError
from recurl.trainers.files.durable import writing
from recurl.trainers.files.owner import OwnerFile, this_process
from recurl.untrusted import open_regular_descriptor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["LOCK_FILES", "FolderLock"]

_LOCK, _OWNER = ".lock", ".owner"
LOCK_FILES = (_LOCK, _OWNER)
"""Names of the files that a lock makes; they are no content of the folder."""
_HELD_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


class FolderLock:
    """The right to write in a folder, held by one process at a time.

    It is a lock of the operating system on the file ``.lock`` in the folder, which is never removed: the system frees
    it when the process ends, however it ends. Children don't inherit it. Where the file system has no locks, a file
    ``.owner`` stands for it and names the process.

    Args:
        folder: the folder; it must exist when the lock is taken.
        notify: called when the file system has no locks.

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
        _ALL.add(self)

    @contextmanager
    def hold(self) -> Generator[None]:
        """Hold the lock inside the block; the same object may hold it again inside.

        Raises:
            LockedError: another process, or another object of this one, holds it.
            StorageError: the folder can't be written.
        """
        if self._depth == 0:
            with writing(self._folder):
                self._take()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._release()

    def _take(self) -> None:
        path = self._folder / _LOCK
        while True:
            descriptor = open_regular_descriptor(path, os.O_RDWR | os.O_CREAT)
            locks = _lock_of_folder(descriptor, self._folder)
            if _is_still(path, descriptor):
                break
            os.close(descriptor)  # the folder was removed and made anew meanwhile
        self._descriptor = descriptor
        if not locks:
            self._take_file()
        if os.fstat(descriptor).st_nlink > 1:  # a hard link to another file, which keeps its content
            return
        with suppress(OSError):  # it is for the message only
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, json.dumps(this_process()).encode())

    def _take_file(self) -> None:
        self._notify(
            f"The file system of {self._folder} has no locks: {_OWNER} there names who works in it; remove "
            "that file if that process is gone."
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
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough while a child has a copy
            os.close(descriptor)

    def _forget(self) -> None:
        """Close the copy of a forked child: the lock is the parent's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._owner = None, None


def _lock_of_folder(descriptor: int, folder: Path) -> bool:
    """Lock an open file, or close it; return whether its file system has locks.

    Raises:
        LockedError: another process holds it.
    """
    try:
        _lock(descriptor)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        said = os.read(descriptor, 400).decode(errors="replace")
        os.close(descriptor)
        if error.errno in _HELD_BY_ANOTHER:
            raise LockedError(_refusal(said, folder)) from None
        raise
    return True


def _lock(descriptor: int) -> None:
    if fcntl is None:
        raise OSError(errno.ENOSYS, "no locks of this kind")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _refusal(said: str, folder: Path) -> str:
    try:
        owner = json.loads(said)
        who = f"Another process (pid {owner['pid']} on {owner['host']})"
    except (ValueError, TypeError, KeyError):  # it is just writing its name
        who = "Another process"
    return f"{who} works in {folder}: wait until it has ended, stop it, or take another folder."


_ALL: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_ALL):
        lock._forget()  # pyright: ignore[reportPrivateUsage] - of this module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
