"""Training process of a sweep: the ``recurl`` command, which stops with a checkpoint when the sweep ends.

A sweep runs ``python -m recurl.cli.job train ...`` with a pipe as standard input. It never writes to the pipe, which is
closed when the sweep exits for any reason.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from recurl.cli.main import main
from recurl.trainers.study.sweep import FINISHED


def stop_with_parent() -> None:
    """Send SIGTERM to this process when its standard input is closed, and replace the latter with an empty stream."""
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
