"""Atomic and durable file operations."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from recurl.core.errors import StorageError
from recurl.core.untrusted import check_regular, open_regular_descriptor

_SUFFIX = ".partial"
_SPACE = "free some space, or use another folder"
_ALLOWED = "use a folder that you can write to"
_ADVICE = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: "raise the file size limit (ulimit -f), or use another folder",
    errno.EROFS: _ALLOWED,
    errno.EACCES: _ALLOWED,
    errno.EPERM: _ALLOWED,
    errno.ELOOP: "use the file or folder that it points to, or remove the link",
    errno.EINVAL: "use a regular file",
    errno.EISDIR: "use a file",
}

_NO_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # file systems that can't sync folders


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Context manager that turns an ``OSError`` into an error that names ``path``, the reason, and a remedy.

    Raises:
        StorageError: in place of the ``OSError``.

    Example:
        >>> with writing(Path("runs/demo/metrics.csv")):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
            ...
        recurl.core.errors.StorageError: Can't write runs/demo/metrics.csv (No space left on device): free some ...
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "use another folder")
        reason = error.strerror or str(error)
        raise StorageError(f"Can't write {path} ({reason}): {advice}.") from error


class _Sink:
    """Output file for ``torch.save``, which swallows errors: keeps the first error and then ignores writes."""

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
    """Context manager that yields a file whose content atomically and durably replaces ``path`` after the block.

    Raises:
        StorageError: if it can't be written, or ``path`` is a link, a folder, a FIFO, a socket or a device. The
            previous content stays intact.

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
            partial.unlink()  # left by a dead process with the same pid, or a link
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


def remove_partial(path: Path) -> None:
    """Remove what processes that were killed while they wrote ``path`` have left; call it while no other may write.

    Raises:
        StorageError: if it can't be removed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     _ = Path(name, "rows.csv.4711.partial").write_text("a,b")
        ...     remove_partial(Path(name, "rows.csv"))
        ...     list(Path(name).iterdir())
        []
    """
    with writing(path):
        for left in path.parent.glob(f"{glob.escape(path.name)}.*{_SUFFIX}"):
            left.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically and durably; see :func:`replacing`.

    Raises:
        StorageError: if it can't be written; the previous content stays intact.
    """
    with replacing(path) as file:
        file.write(data)


def write_all(descriptor: int, data: Any) -> None:
    """Write all of ``data``, with as many system calls as necessary.

    Raises:
        OSError: if it can't be written.
    """
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def make_folder(path: Path) -> None:
    """Create a folder and its parents durably, so that they survive a power failure.

    Raises:
        StorageError: if it can't be created.
    """
    with writing(path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Flush the directory entries of a folder to disk: created, replaced or removed names.

    Raises:
        StorageError: if the flush fails.
    """
    if os.name == "nt":  # folders can't be opened on Windows
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
    """Return whether ``path`` is a temporary file of :func:`replacing`, left by a process that died."""
    return path.name.endswith(_SUFFIX)


def remove_partials(folder: Path, name: str = "*") -> None:
    """Remove temporary files for ``name`` left by processes that died; the caller must hold the lock of ``folder``."""
    for path in folder.glob(f"{name}.*{_SUFFIX}"):
        with suppress(OSError):
            path.unlink()
