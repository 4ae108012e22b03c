"""Tensors in memory shared between processes."""

from __future__ import annotations

import faulthandler
import math
import mmap
import os
import select
import signal
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import NamedTuple

import torch
from torch import Tensor

from recurl.core.errors import UnsupportedError, WorkerError
from recurl.core.keys import NestedKey

__all__ = ["Entry", "SharedTensors", "anonymous_file", "check_posix"]

_NEEDED = {
    os: ("killpg", "lockf", "pread"),
    select: ("poll",),
    signal: ("SIGKILL", "SIGUSR1"),
    socket: ("SCM_RIGHTS",),
    faulthandler: ("register",),
}


def check_posix() -> None:
    """Check that the system has the process groups, locks, and sockets that workers need.

    Raises:
        UnsupportedError: this is Windows or another system that lacks them.

    Example:
        >>> check_posix()
    """
    lacking = [
        f"{module.__name__}.{name}" for module, names in _NEEDED.items() for name in names if not hasattr(module, name)
    ]
    if lacking:
        raise UnsupportedError(
            f"Worker processes need a POSIX system such as Linux or macOS, and {sys.platform} lacks "
            f"{', '.join(lacking)}: use SerialEnv instead of ParallelEnv, Collector instead of a collector with "
            "workers, and no --overlap."
        )


_ALIGNMENT = 64


class Entry(NamedTuple):
    """Key, shape and dtype of one tensor in shared memory."""

    key: NestedKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SharedTensors:
    """CPU tensors, by key, in one block of anonymous memory that can be sent to other processes.

    The file is closed with this object and its tensors. The memory has no name, so it is freed once the last process
    has closed it or died, and it does not count against the size of ``/dev/shm``.

    Args:
        entries: keys, shapes, and dtypes of the tensors.
        file: file descriptor of memory created elsewhere for the same ``entries``; this object takes ownership. New
            memory is created when None.

    Raises:
        UnsupportedError: the system is not POSIX.

    Attributes:
        block: the memory, uint8.
        tensors: the tensors in it, uninitialized. They keep the memory alive.

    Example:
        >>> shared = SharedTensors([Entry("reward", (2, 1), torch.float32)])
        >>> shared.tensors["reward"].shape
        torch.Size([2, 1])
        >>> shared.close()
    """

    def __init__(self, entries: Sequence[Entry], file: int | None = None) -> None:
        check_posix()
        self.entries = tuple(entries)
        offsets = [0]
        for entry in self.entries:
            offsets.append(-(-(offsets[-1] + entry.size) // _ALIGNMENT) * _ALIGNMENT)
        size = max(offsets[-1], _ALIGNMENT)
        self._file = anonymous_file(size) if file is None else file
        self._closing = weakref.finalize(self, os.close, self._file)
        self.block = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        self.tensors: dict[NestedKey, Tensor] = {}
        for entry, offset in zip(self.entries, offsets, strict=False):
            values = self.block[offset : offset + entry.size].view(entry.dtype)
            self.tensors[entry.key] = values.view(entry.shape)

    def send(self, connection: Connection) -> None:
        """Send the memory to the process at the other end of ``connection``, which calls :meth:`receive`."""
        assert self._closing.alive
        send_handle(connection, self._file, None)

    @classmethod
    def receive(cls, connection: Connection, entries: Sequence[Entry]) -> SharedTensors:
        """Receive memory from the process at the other end of ``connection``, which calls :meth:`send`."""
        return cls(entries, recv_handle(connection))

    @contextmanager
    def lock(self, seconds: float | None = None) -> Generator[None]:
        """Hold an inter-process lock on the memory; it is released if the process dies.

        Args:
            seconds: maximum time to wait for the lock; None for no limit.

        Raises:
            WorkerError: another process holds the lock for longer.
        """
        assert self._closing.alive
        end = math.inf if seconds is None else time.monotonic() + seconds
        while not self._try_lock():
            if time.monotonic() > end:
                raise WorkerError(
                    f"A worker process hangs: it has held the shared-memory lock for {seconds:g} s (timeout=)."
                )
            time.sleep(0.001)
        try:
            yield
        finally:
            os.lockf(self._file, os.F_ULOCK, 0)

    def _try_lock(self) -> bool:
        try:
            os.lockf(self._file, os.F_TLOCK, 0)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def close(self) -> None:
        """Close the file descriptor; the tensors remain valid, and the memory is freed with the last of them."""
        self._closing()


def anonymous_file(size: int) -> int:
    """Return a file descriptor of ``size`` zero bytes of anonymous memory."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("recurl")
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.ftruncate(file, size)
    return file
