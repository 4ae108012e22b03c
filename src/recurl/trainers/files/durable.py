"""Files that are whole and on disk, or as they were before."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from recurl.errors import StorageError
from recurl.untrusted import check_regular, open_regular_descriptor

_SUFFIX = ".partial"
_SPACE = "make room there, or take a folder elsewhere"
_ALLOWED = "take a folder that you may write to"
_ADVICE = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or take a folder elsewhere",
    errno.EROFS: _ALLOWED,
    errno.EACCES: _ALLOWED,
    errno.EPERM: _ALLOWED,
    errno.ELOOP: "name the file or folder that it points to, or remove the link",
    errno.EINVAL: "name a regular file",
    errno.EISDIR: "name a file",
}

_NO_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # a file system without such a call


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Turn an ``OSError`` in the block into one that names ``path``, the reason, and a remedy.

    Raises:
        StorageError: instead of it.

    Example:
        >>> with writing(Path("runs/demo/metrics.csv")):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
            ...
        recurl.errors.StorageError: Can't write runs/demo/metrics.csv (No space left on device): make room there, or ...
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "take a folder elsewhere")
        reason = error.strerror or str(error)
        raise StorageError(f"Can't write {path} ({reason}): {advice}.") from error


class _Sink:
    """File for ``torch.save``, which loses errors: keeps the first one, and writes no more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                write_all(self._descriptor, data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""


@contextmanager
def replacing(path: Path) -> Generator[Any]:
    """Yield a file to write to, whose content stands under ``path`` after the block: whole and on disk, or not at all.

    Raises:
        StorageError: it can't be written, or ``path`` is a link, a folder, a FIFO, a socket or a device; what was there
            before is unharmed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     path = Path(name) / "file"
        ...     with replacing(path) as file:
        ...         _ = file.write(b"all of it")
        ...         before = path.exists()
        ...     before, path.read_bytes()
        (False, b'all of it')
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}{_SUFFIX}")
    with writing(path):
        with suppress(FileNotFoundError):
            check_regular(path)
        with suppress(FileNotFoundError):
            partial.unlink()  # of a process of the same number that died, or a link
        try:
            descriptor = open_regular_descriptor(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                sink = _Sink(descriptor)
                yield sink
                if sink.error is not None:
                    raise sink.error
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        sync_folder(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Replace the content of ``path``, or make it; see :func:`replacing`.

    Raises:
        StorageError: it can't be written; what was there before is unharmed.
    """
    with replacing(path) as file:
        file.write(data)


def write_all(descriptor: int, data: Any) -> None:
    """Write all of ``data``, in as many system calls as it takes.

    Raises:
        OSError: it can't be written.
    """
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def make_folder(path: Path) -> None:
    """Make a folder and its parents, durably: a power failure loses none of them.

    Raises:
        StorageError: it can't be made.
    """
    with writing(path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to disk: names that were made, replaced or removed.

    Raises:
        StorageError: the disk refuses.
    """
    if os.name == "nt":  # a folder can't be opened there
        return
    with writing(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDERS:
                raise
        finally:
            os.close(descriptor)


def is_partial(path: Path) -> bool:
    """Return whether ``path`` was left behind by a process that died in :func:`replacing`."""
    return path.name.endswith(_SUFFIX)


def remove_partials(folder: Path, name: str = "*") -> None:
    """Remove what processes that died in :func:`replacing` left of ``name``; call it under the lock of ``folder``."""
    for path in folder.glob(f"{name}.*{_SUFFIX}"):
        with suppress(OSError):
            path.unlink()
