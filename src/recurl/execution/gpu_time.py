"""GPU busy time from profiler records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["busy_seconds", "gpu_seconds"]


def gpu_seconds(run: Callable[[], object]) -> float:
    """Return the GPU busy time of ``run`` in seconds: kernels and copies, with concurrent ones counted once.

    The profiler slows down the host but not the kernels.

    Args:
        run: function to profile; it may return before its kernels end.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    profiler: Any = recorded.profiler
    events = profiler.kineto_results.events()
    return busy_seconds(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type().name == "CUDA" and not event.is_user_annotation()
    )


def busy_seconds(spans: Iterable[tuple[int, int]]) -> float:
    """Return the length of the union of time spans in seconds.

    Args:
        spans: begin and end of each span in nanoseconds.

    Example:
        >>> busy_seconds([(0, 2_000_000_000), (1_000_000_000, 3_000_000_000), (5_000_000_000, 6_000_000_000)])
        4.0
    """
    total, until = 0, 0
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0)
        until = max(until, end)
    return total / 1e9
