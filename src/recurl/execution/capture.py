"""Conditions of CUDA graph capture: tensors that stay in place, and no garbage collection during the capture."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn

from recurl.core.torch_compat import hooks_of, tensors_of

__all__ = ["ModuleGuard", "recording", "without_garbage_collection"]

_SETTINGS = (bool, int, float, str, type, FunctionType, MethodType)


class ModuleGuard:
    """Guard that detects whether submodules, parameters or buffers of a module were replaced since its creation.

    Args:
        module: the guarded module.
        modes: also guard how modules compute: their hooks, and their public attributes that are numbers, strings, types
            or functions (``training``, ``p``, a ``forward`` set on the instance).

    Example:
        >>> net = nn.Linear(2, 1)
        >>> kept = ModuleGuard(net)
        >>> kept.replaced() is None
        True
        >>> net.weight = nn.Parameter(net.weight.clone())
        >>> kept.replaced()
        'weight'
    """

    def __init__(self, module: nn.Module, *, modes: bool = False) -> None:
        self._module, self._modes = module, modes
        self._kept = _held(module, modes)

    def replaced(self) -> str | None:
        """Return the name of an entry that was replaced, added, removed, or that computes in another way; or None."""
        now = _held(self._module, self._modes)
        for name, (kept, state) in self._kept.items():
            found, after = now.pop(name, (None, None))
            if found is not kept or after != state:
                return name
        return next(iter(now), None)


def _held(module: nn.Module, modes: bool) -> dict[str, tuple[nn.Module | Tensor, object]]:
    """Return the submodules and tensors of ``module`` by name, with the memory of tensors and the modes of modules."""
    held: dict[str, tuple[nn.Module | Tensor, object]] = {}
    for path, part in module.named_modules():
        held[path] = part, _mode(part) if modes else None
        for owned in tensors_of(part):
            for name, tensor in owned.items():
                if tensor is not None:
                    held[f"{path}.{name}" if path else name] = tensor, (tensor.data_ptr(), tensor.stride())
    return held


def _mode(module: nn.Module) -> object:
    """Return the comparable settings that a module's operations depend on, besides its modules and tensors."""
    own = {name: value for name, value in vars(module).items() if name[0] != "_" and isinstance(value, _SETTINGS)}
    return own, hooks_of(module)


@contextmanager
def without_garbage_collection() -> Generator[None]:
    """Collect garbage, then disable collection inside the block: freeing an older graph during a capture spoils it.

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
    """Capture CUDA graphs inside the block, without garbage collection, while other threads may use the GPU.

    NCCL's threads do, which would invalidate a capture in torch's default mode. See :func:`without_garbage_collection`.
    """
    graph = torch.cuda.graph
    torch.cuda.graph = partial(graph, capture_error_mode="thread_local")
    try:
        with without_garbage_collection():
            yield
    finally:
        torch.cuda.graph = graph
