"""What the recording of a CUDA graph asks for: memory that stays where it is, and no garbage collection meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recurl._torch import tensors_of
from recurl.errors import UsageError

__all__ = ["KeptTensors", "recording", "without_garbage_collection"]


class KeptTensors:
    """The parameters and buffers of a module, to be changed in place only.

    Args:
        module: whose.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> kept = KeptTensors(net)
        >>> kept.check()
        >>> net.weight = nn.Parameter(net.weight.clone())
        >>> kept.check()
        Traceback (most recent call last):
        recurl.errors.UsageError: weight was replaced since the first step, but a CUDA graph goes on with the old ...
    """

    def __init__(self, module: nn.Module) -> None:
        self._watched: list[tuple[dict[str, Any], str, Tensor, int]] = [
            (owned, name, tensor, tensor.data_ptr())
            for part in module.modules()
            for owned in tensors_of(part)
            for name, tensor in owned.items()
            if tensor is not None
        ]

    def check(self) -> None:
        """Refuse tensors that were replaced.

        Raises:
            UsageError: one was; the message names it.
        """
        for owned, name, tensor, pointer in self._watched:
            if owned.get(name) is not tensor or tensor.data_ptr() != pointer:
                raise UsageError(
                    f"{name} was replaced since the first step, but a CUDA graph goes on with the old one: change it "
                    "in place, or call reset() to record the graph anew."
                )


@contextmanager
def without_garbage_collection() -> Generator[None]:
    """Collect garbage, and none inside the block: an older graph that is freed while one is recorded spoils it.

    Example:
        >>> with without_garbage_collection():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def recording() -> Generator[None]:
    """Record CUDA graphs inside the block: see :func:`without_garbage_collection`; other threads may use the GPU.

    NCCL's threads do, which would spoil a recording in the mode that is torch's default.
    """
    graph = torch.cuda.graph
    torch.cuda.graph = partial(graph, capture_error_mode="thread_local")
    try:
        with without_garbage_collection():
            yield
    finally:
        torch.cuda.graph = graph
