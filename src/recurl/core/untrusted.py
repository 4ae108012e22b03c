"""Safe access to untrusted files: symbolic links are not followed, and reads are bounded.

A run folder is data and may come from an untrusted source. An entry is opened only if it is a regular file: a link
would be read (or written) at its target, a FIFO would block, and opening a device could have any side effect.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Literal, cast

__all__ = ["check_folder", "check_regular", "open_regular", "open_regular_descriptor", "read_bytes", "read_json"]

_DEEPEST = 32  # levels of JSON
_DEEP = f"it is nested more than {_DEEPEST} levels deep"

_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # Windows has none of these
_NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
_PRIVATE: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)


def open_regular(path: Path, mode: Literal["rb", "r+b"] = "rb", *, most: int | None = None) -> IO[bytes]:
    """Open an existing regular file.

    Args:
        path: the file. Only its last component must not be a link.
        mode: ``"rb"`` for reading, ``"r+b"`` for reading and writing.
        most: maximum size in bytes; None for no limit.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is a symbolic link, a folder, a FIFO, a socket or a device, is too large, or can't be opened. Its
            ``strerror`` gives the reason.

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
    file = os.fdopen(open_regular_descriptor(path, os.O_RDONLY if mode == "rb" else os.O_RDWR), mode)
    if most is not None and os.fstat(file.fileno()).st_size > most:
        file.close()
        raise _too_large(path, most)
    return file


def open_regular_descriptor(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file like :func:`os.open`, without following a link and without blocking.

    Args:
        path: the file. Only its last component must not be a link.
        flags: as in :func:`os.open`; ``O_CREAT`` creates a missing file. ``O_TRUNC`` is applied after the checks.
        mode: permissions of a newly created file.

    Raises:
        FileNotFoundError: the file is missing, and ``flags`` does not include ``O_CREAT``.
        OSError: see :func:`open_regular`.
    """
    try:
        check_regular(path)  # opening a device may have side effects, and opening a FIFO for writing fails obscurely
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | _NO_LINK | _NO_WAIT | _PRIVATE, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it has been replaced by a link meanwhile
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
    """Check that a path is a regular file and not a link to one.

    Raises:
        FileNotFoundError: there is nothing.
        OSError: see :func:`open_regular`.
    """
    found = os.lstat(path).st_mode
    if not stat.S_ISREG(found):
        raise _refusal(path, found)


def check_folder(path: Path) -> None:
    """Check that a path is a folder and not a link to one.

    Raises:
        FileNotFoundError: there is nothing.
        OSError: it is a symbolic link or a file. Its ``strerror`` gives the reason.
    """
    found = os.lstat(path).st_mode
    if stat.S_ISREG(found):
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(path))
    if not stat.S_ISDIR(found):
        raise _refusal(path, found)


def _refusal(path: Path, found: int) -> OSError:
    if stat.S_ISDIR(found):
        return IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if stat.S_ISLNK(found):
        return OSError(errno.ELOOP, "it is a symbolic link", str(path))
    return OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: the file.
        most: bytes that it may have.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is larger, or see :func:`open_regular`.
    """
    with open_regular(path, most=most) as file:
        data = file.read(most + 1)  # the file may grow meanwhile
    if len(data) > most:
        raise _too_large(path, most)
    return data


def _too_large(path: Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))


def read_json(path: Path, most: int = 2**20) -> Any:
    """Return the value in a JSON file; infinite numbers are allowed, in Python's notation.

    Args:
        path: the file.
        most: bytes that it may have.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is larger, or see :func:`open_regular`.
        ValueError: it isn't JSON in UTF-8, an object in it has a duplicate key, it contains a NaN, a number is too
            long, or it is nested too deeply.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     path = Path(name) / "config.json"
        ...     _ = path.write_text('{"seed": 0, "seed": 1}')
        ...     try:
        ...         read_json(path)
        ...     except ValueError as error:
        ...         print(error)
        an object has the key 'seed' twice
    """
    try:
        value = json.loads(read_bytes(path, most).decode(), object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise ValueError(_DEEP) from None
    _check_depth(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"an object has the key {twice[:60]!r} twice")
    return found


def _constant(text: str) -> float:
    if text == "NaN":
        raise ValueError("NaN is not a valid value of an option")
    return float(text)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        level = [part for one in level for part in _parts(one)]
        if not level:
            return
    raise ValueError(_DEEP)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()
