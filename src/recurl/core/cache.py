"""Folder of what this machine has compiled or measured once: kernels, programs, choices."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ["cache_folder", "compiled_folder", "compiled_folders", "compiled_name", "use_compiled_folder"]

_CPUINFO = Path("/proc/cpuinfo")

_PARTS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variables of compilers and the subfolders of their caches; NVRTC's kernels are in Triton's."""


def cache_folder() -> Path:
    """Return the folder: ``RECURL_CACHE_DIR``, else ``recurl`` in the user's cache folder.

    Example:
        >>> cache_folder().is_absolute()
        True
    """
    folder = os.environ.get("RECURL_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "recurl"
    return Path(folder).expanduser()


def compiled_folders() -> Path:
    """Return the folder of compiled kernels and programs of all versions."""
    return cache_folder() / "compiled"


@cache
def compiled_name() -> str:
    """Return the name of the folder of the installed torch, Triton and Python, and of this processor.

    Programs are compiled for the instructions of the processor, and homes may be shared between machines.
    """
    names: list[str] = []
    for package in ("torch", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            names.append(f"{package}-{importlib.metadata.version(package)}")
    return "-".join([*names, f"python-{sys.version_info.major}.{sys.version_info.minor}", _processor()])


def compiled_folder() -> Path:
    """Return the folder of kernels and programs compiled with what is installed; see :func:`compiled_name`."""
    return compiled_folders() / compiled_name()


def _processor() -> str:
    """Return the architecture, with a digest of the instructions of the processor and of those that torch may use."""
    found = os.environ.get("ATEN_CPU_CAPABILITY", "")
    with suppress(OSError):
        found += next(
            (line for line in _CPUINFO.read_text().splitlines() if line.startswith(("flags", "Features"))), ""
        )
    return f"{platform.machine()}-{hashlib.sha256(found.encode()).hexdigest()[:8]}"


def use_compiled_folder() -> None:
    """Let the compilers of this process, and of processes that it starts, keep their results in the folder.

    A compiler whose environment variable is set keeps its own. If the folder can't be created, all of them do.
    """
    for variable, part in _PARTS.items():
        if variable not in os.environ:
            folder = compiled_folder() / part
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                os.environ[variable] = str(folder)
