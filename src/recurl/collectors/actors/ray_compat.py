"""Private names of Ray used by recurl, each with its purpose and a fallback if it disappears."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from recurl.core.private_names import absent_error, load

__all__ = ["on_loopback"]

_CONSTANTS = "ray._private.ray_constants"


@contextmanager
def on_loopback() -> Generator[None]:
    """Let Ray bind to the loopback interface inside the block; on Linux it would otherwise use the machine's address.

    Ray replaces ``127.0.0.1`` by the machine's address unless this constant is false, and binds every other address,
    also ``127.0.0.2``, on all interfaces. Its environment variable, ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER``, is read only
    when Ray is imported, and would then hold for later connections to clusters too. A node started by another process
    with that variable requires a token, which a driver sends only if the authentication mode of its whole process is
    changed. No replacement: without the constant, nothing is started.

    Raises:
        UnsupportedError: Ray has no such constant.
    """
    constants = load(_CONSTANTS)
    if not hasattr(constants, "ENABLE_RAY_CLUSTER"):
        raise absent_error(f"{_CONSTANTS}:ENABLE_RAY_CLUSTER")
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
