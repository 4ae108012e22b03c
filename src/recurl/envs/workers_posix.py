"""Operating system requirements of worker processes."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys

from recurl.core.errors import UnsupportedError

__all__ = ["check_posix"]

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
