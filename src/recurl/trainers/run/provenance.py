"""Provenance of a run: versions, commit, machine, command line."""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

import torch

from recurl.core.devices import cpu_name
from recurl.core.versions import source_commit, versions
from recurl.distributed import world_size


def provenance(device: str) -> dict[str, Any]:
    """Return versions, commit, machine and command line of this process as plain values.

    Args:
        device: device of the run.

    Example:
        >>> found = provenance("cpu")
        >>> found["gpu"], found["ranks"], sorted(found)[:5]
        (None, 1, ['command', 'commit', 'cpu', 'cuda', 'gpu'])
    """
    on_gpu = torch.device(device).type == "cuda"
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        **versions(),
        "commit": source_commit(),
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cpu": cpu_name(),
        "platform": platform.platform(),
        "ranks": world_size(),
    }
