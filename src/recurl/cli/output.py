"""The standard streams of a command, which may be closed, full, or a pipe that nobody reads any more."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TextIO

_BROKEN_PIPE = 128 + 13  # as a shell reports the end by SIGPIPE, which not every system has


def with_output(run: Callable[[], int]) -> int:
    """Return the exit code of ``run()``, whose output has been written when this returns.

    * A stream that was closed when the process began discards what is written.
    * A pipe that nobody reads any more ends the command without a word, with 141.
    * Output that can't be written, as on a full disk, ends it with one line on the error stream, and 2.

    Raises:
        SystemExit: as ``run()`` did.

    Example:
        >>> with_output(lambda: 3)
        3
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _discarding(descriptor))
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


def _discarding(descriptor: int) -> TextIO:
    """Return a stream that discards what is written, on the descriptor, which no other file shall have."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    return open(descriptor, "w", encoding="utf-8", closefd=False)


def _discard(stream: TextIO) -> None:
    """Let what the stream still holds, which the end of the process would try to write again, go nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
