"""Compute devices, and the cores and memory of this machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import overload

import torch

from recurl.core.errors import ArgumentError

__all__ = [
    "check_device",
    "check_memory",
    "checked_device",
    "core_count",
    "cpu_name",
    "is_autocast_on",
    "numbered",
    "total_memory",
]


@overload
def numbered(device: torch.device | str) -> torch.device: ...


@overload
def numbered(device: torch.device | str | None) -> torch.device | None: ...


def numbered(device: torch.device | str | None) -> torch.device | None:
    """Return the device with an explicit index, as tensors report it: ``cuda`` becomes the current GPU, ``cuda:0``.

    Example:
        >>> numbered("cpu"), numbered(None)
        (device(type='cpu'), None)
    """
    if device is None:
        return None
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found == _GPU and torch.cuda.is_available() else found


_GPU = torch.device("cuda")  # without an index

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

_CPU_MODEL = Path("/proc/cpuinfo")

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def checked_device(device: torch.device | str | None) -> torch.device:
    """Return a device of this machine with an explicit index, torch's default device if None; see :func:`check_device`.

    Example:
        >>> checked_device(None)
        device(type='cpu')
    """
    found = torch.get_default_device() if device is None else device
    check_device(str(found))
    return numbered(found)


def check_device(device: str) -> None:
    """Check that a device can be used on this machine.

    Args:
        device: name as torch takes it, for instance ``"cpu"`` or ``"cuda:0"``.

    Raises:
        ArgumentError: the device is unknown to torch (or to this build of it), is missing on this machine, or can't
            hold values (``"meta"``).

    Example:
        >>> check_device("cpu")
        >>> check_device("meta")
        Traceback (most recent call last):
        ...
        recurl.core.errors.ArgumentError: --device meta can't be used, try --device cpu: ...
    """
    try:
        requested = torch.device(device)
        if requested.type == "cpu" and requested.index not in (None, 0):
            raise ArgumentError("there is one CPU device")
        torch.ones(1, device=requested).add(1).item()
    except Exception as error:  # torch raises errors of many types here
        reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
        raise ArgumentError(f"--device {device} can't be used, try --device cpu: {reason}") from error


def is_autocast_on(device: torch.device) -> bool:
    """Return whether autocast is enabled for a device; it never is for one that has none, such as ``meta``.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     is_autocast_on(torch.device("cpu")), is_autocast_on(torch.device("meta"))
        (True, False)
    """
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def core_count() -> int:
    """Return the number of cores this process may use, limited by its CPU affinity and its container."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, _CPU_QUOTA.read_text().split())
    except (OSError, ValueError):  # no container, or no limit
        return own
    return max(1, min(own, quota // period))


def cpu_name() -> str:
    """Return the model name of this CPU on Linux, or its architecture on other systems."""
    try:
        lines = _CPU_MODEL.read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def total_memory(device: str) -> int:
    """Return the memory of a device in bytes: of the GPU, or of the machine (or its container) for the CPU.

    If the system does not report it (Windows), return the size of the address space.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else sys.maxsize]
    for limit in _LIMITS:
        try:
            sizes.append(int(limit.read_text()))
        except (OSError, ValueError):  # no container, or no limit
            continue
    return min(sizes)


def check_memory(device: str, parts: Mapping[str, int], advice: Callable[[], str]) -> None:
    """Check that a configuration does not need more memory than the device has.

    Args:
        device: name as torch takes it, for instance ``"cpu"`` or ``"cuda:0"``.
        parts: minimum number of bytes needed, by purpose.
        advice: returns which options to lower, the end of the error message; called only for an error.

    Raises:
        ArgumentError: the sum of ``parts`` exceeds the memory of the device.

    Example:
        >>> check_memory("cpu", {"the weights": 2**20}, lambda: "take less")
        >>> check_memory("cpu", {"weights": 2**60, "a batch": 2**20}, lambda: "lower --hidden-size")
        Traceback (most recent call last):
        ...
        recurl.core.errors.ArgumentError: At least 1,073,741,824 GiB of memory are needed ...
    """
    needed, has = sum(parts.values()), total_memory(device)
    if needed <= has:
        return
    largest = ", ".join(f"{_gib(size)} for {name}" for name, size in parts.items() if size > needed / 20)
    raise ArgumentError(
        f"At least {_gib(needed)} of memory are needed ({largest}), and {device} has {_gib(has)}: {advice()}."
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.0f} GiB" if size < 10**24 else f"{size / 2**30:.0e} GiB"
