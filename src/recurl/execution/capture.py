"""Capture of CUDA graphs, and its conditions: tensors that stay in place, and no garbage collection meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn

from recurl.core.torch_compat import hooks_of, tensors_of

__all__ = ["ModuleGuard", "on_side_stream", "record", "without_garbage_collection"]

T = TypeVar("T")

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


def record(run: Callable[[], T], device: torch.device, *generators: torch.Generator) -> tuple[Callable[[], None], T]:
    """Capture the kernels that ``run`` launches as a CUDA graph, without executing them.

    Other threads may use the GPU during the capture, as those of NCCL do. See :func:`without_garbage_collection`.

    Args:
        run: function that launches kernels on the current stream. Run it before on :func:`on_side_stream`, so that
            kernels are compiled and libraries have allocated their memory.
        device: the GPU.
        generators: random generators that it draws from, in addition to that of the device.

    Returns:
        the function that replays the graph on the current stream, and the result of ``run``, which replays overwrite.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    stream = _side_stream(device)
    with (
        without_garbage_collection(),
        torch.cuda.stream(stream),  # restores the current stream even where the end of a failed capture doesn't
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        result = run()
    return graph.replay, result


@contextmanager
def on_side_stream(device: torch.device) -> Generator[None]:
    """Launch kernels on another stream of a GPU inside the block, in order with those of the current stream."""
    current, stream = torch.cuda.current_stream(device), _side_stream(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


class _Streams(threading.local):
    """Side streams of this thread by GPU: kernels of another thread would become part of its captures."""

    def __init__(self) -> None:
        self.by_index: dict[int, torch.cuda.Stream] = {}


_streams = _Streams()


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU on which functions of this thread run before and while they are captured."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _streams.by_index:
        _streams.by_index[index] = torch.cuda.Stream(torch.device("cuda", index))
    return _streams.by_index[index]
