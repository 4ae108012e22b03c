"""Notice for training without the C++ library."""

from __future__ import annotations

from recurl.cli.notices import notify
from recurl.core.errors import UnsupportedError
from recurl.distributed import is_local_main_process
from recurl.recurrence import BACKENDS


def notify_if_slow(device: str) -> None:
    """Print a notice if training on ``device`` is slow because the C++ library is missing."""
    if not (device.startswith("cpu") and is_local_main_process()):
        return
    try:
        BACKENDS.check_name("cpu")
    except UnsupportedError as error:
        notify(f"Training on this CPU is several times slower than it could be. {error}")
