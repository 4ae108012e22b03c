"""Files that somebody else may have written: opened without following links, and read within bounds.

A run folder is data, and may come from elsewhere. What stands under a name in it is opened only if it is a regular
file: a link would be read (or written) where it points to, a FIFO would block, a device could do anything.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Literal

__all__ = ["check_regular", "open_regular", "open_regular_descriptor"]

_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # Windows has none of these
_NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
_PRIVATE: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)


def open_regular(path: Path, mode: Literal["rb", "r+b"] = "rb") -> IO[bytes]:
    """Open an existing regular file.

    Args:
        path: the file. Only its last component must not be a link.
        mode: for reading, or for reading and writing.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is a symbolic link, a folder, a FIFO, a socket or a device, or can't be opened. Its ``strerror``
            says which.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     path, link = Path(name) / "file", Path(name) / "link"
        ...     _ = path.write_bytes(b"content")
        ...     link.symlink_to(path)
        ...     with open_regular(path) as file:
        ...         file.read()
        ...     try:
        ...         open_regular(link)
        ...     except OSError as error:
        ...         error.strerror
        b'content'
        'it is a symbolic link'
    """
    return os.fdopen(open_regular_descriptor(path, os.O_RDONLY if mode == "rb" else os.O_RDWR), mode)


def open_regular_descriptor(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file like :func:`os.open`, without following a link and without ever blocking.

    Args:
        path: the file. Only its last component must not be a link.
        flags: as of :func:`os.open`; ``O_CREAT`` makes the file when it is missing. ``O_TRUNC`` is applied after the
            checks.
        mode: permissions of a file that is made.

    Raises:
        FileNotFoundError: there is no such file, and ``flags`` has no ``O_CREAT``.
        OSError: see :func:`open_regular`.
    """
    try:
        check_regular(path)  # opening a device could do something, and opening a FIFO for writing fails obscurely
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | _NO_LINK | _NO_WAIT | _PRIVATE, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it became a link meanwhile
            raise _refusal(path, stat.S_IFLNK) from None
        raise
    try:
        found = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(found):
            raise _refusal(path, found)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: Path) -> None:
    """Refuse what is not a regular file, a link to one included.

    Raises:
        FileNotFoundError: there is nothing.
        OSError: see :func:`open_regular`.
    """
    found = os.lstat(path).st_mode
    if not stat.S_ISREG(found):
        raise _refusal(path, found)


def _refusal(path: Path, found: int) -> OSError:
    if stat.S_ISDIR(found):
        return IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if stat.S_ISLNK(found):
        return OSError(errno.ELOOP, "it is a symbolic link", str(path))
    return OSError(errno.EINVAL, "it is not a regular file", str(path))
