"""What the recording of a CUDA graph asks for: memory that stays where it is, and no garbage collection meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from recurl._torch import tensors_of

__all__ = ["KeptTensors", "recording", "without_garbage_collection"]


class KeptTensors:
    """The submodules, parameters and buffers of a module, to be changed in place only.

    Args:
        module: whose.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> kept = KeptTensors(net)
        >>> kept.replaced() is None
        True
        >>> net.weight = nn.Parameter(net.weight.clone())
        >>> kept.replaced()
        'weight'
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept = _held(module)

    def replaced(self) -> str | None:
        """Return the name of what was replaced, added or removed since, or None."""
        now = _held(self._module)
        for name, (kept, pointer) in self._kept.items():
            found, at = now.pop(name, (None, None))
            if found is not kept or at != pointer:
                return name
        return next(iter(now), None)


def _held(module: nn.Module) -> dict[str, tuple[nn.Module | Tensor, int | None]]:
    """Return what ``module`` holds, by name, and where the memory of tensors is."""
    held: dict[str, tuple[nn.Module | Tensor, int | None]] = {}
    for path, part in module.named_modules():
        held[path] = part, None
        for owned in tensors_of(part):
            for name, tensor in owned.items():
                if tensor is not None:
                    held[f"{path}.{name}" if path else name] = tensor, tensor.data_ptr()
    return held


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
