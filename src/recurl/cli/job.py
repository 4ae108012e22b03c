"""A training of a sweep: the ``recurl`` command, which stops with a checkpoint once the sweep has ended.

A sweep runs ``python -m recurl.cli.job train ...`` with a pipe as standard input, into which it never writes: the pipe
ends when the sweep does, however it does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from recurl.cli.main import main
from recurl.trainers.study.sweep import FINISHED


def stop_with_parent() -> None:
    """Send SIGTERM to this process when its standard input ends; from now on, reading that gives nothing."""
    pipe, null = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    threading.Thread(target=_stop_at_end, args=(pipe,), daemon=True).start()


def _stop_at_end(pipe: int) -> None:
    while os.read(pipe, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    stop_with_parent()
    sys.exit(main() or FINISHED)
