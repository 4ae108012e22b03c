"""Handling of closed standard streams, broken pipes, and full disks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TextIO

_BROKEN_PIPE = 128 + 13  # the shell's exit code for SIGPIPE, a signal that not every system has


def with_output(run: Callable[[], int]) -> int:
    """Call ``run()``, flush its output, and return its exit code.

    * Output to a stream that was closed when the process started is discarded.
    * A broken pipe ends the command silently with exit code 141.
    * Output that can't be written, as on a full disk, ends it with one line on standard error and exit code 2.

    Raises:
        SystemExit: if raised by ``run()``.

    Example:
        >>> with_output(lambda: 3)
        3
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _null_stream(descriptor))
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        _discard(sys.stderr)
        return _BROKEN_PIPE
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"recurl: The output can't be written: {error.strerror}.", file=sys.stderr)
        _discard(sys.stdout)
        _discard(sys.stderr)
        return 2


def _null_stream(descriptor: int) -> TextIO:
    """Return a stream that discards output, reserving the descriptor so that no other file gets it."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    return open(descriptor, "w", encoding="utf-8", closefd=False)


def _discard(stream: TextIO) -> None:
    """Discard the stream's buffered output, which the interpreter would otherwise try to flush at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
