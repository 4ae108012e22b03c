"""How long a GPU works, by the profiler's record of what ran on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["busy_seconds", "gpu_seconds"]


def gpu_seconds(run: Callable[[], object]) -> float:
    """Return for how long kernels and copies run on the GPU while ``run`` does, in seconds; those at once count once.

    The profiler adds to the time that the host takes, not to that of the kernels.

    Args:
        run: what to record; it may return before its kernels end.
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
    """Return the length of the union of spans, in seconds.

    Args:
        spans: begin and end of each, in nanoseconds.

    Example:
        >>> busy_seconds([(0, 2_000_000_000), (1_000_000_000, 3_000_000_000), (5_000_000_000, 6_000_000_000)])
        4.0
    """
    total, until = 0, 0
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0)
        until = max(until, end)
    return total / 1e9
