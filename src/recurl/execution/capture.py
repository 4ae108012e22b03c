"""Functions of tensors as CUDA graphs, and their conditions: modules that stay in place, no garbage collection."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from recurl.core.errors import UsageError
from recurl.core.torch_compat import foreach_copy_, hooks_of, tensors_of
from recurl.execution.source_lines import line_of

__all__ = [
    "SETTINGS",
    "WARM_UP",
    "GraphedFunction",
    "ModuleGuard",
    "on_side_stream",
    "record",
    "without_garbage_collection",
]

T = TypeVar("T")

WARM_UP = 2
"""Calls before a capture, in which kernels are compiled, libraries allocate memory and optimizers create state."""

SETTINGS = (bool, int, float, str, type, FunctionType, MethodType)
"""Types of the public attributes that are part of the mode of a module."""


class ModuleGuard:
    """Guard of all that a compiled or captured function reads once: detects what was replaced since :meth:`renew`.

    It guards submodules, parameters and buffers: their identity and memory, and which require gradients, but not their
    numbers.

    Args:
        module: the guarded module, or None.
        modes: also guard how modules compute: their hooks, and their public attributes that are numbers, strings, types
            or functions (``training``, ``p``, a ``forward`` set on the instance).
        settings: returns further objects by name, which are guarded by identity, or by their value if they are numbers,
            strings, types or functions.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> kept = ModuleGuard(net)
        >>> kept.replaced() is None
        True
        >>> net.weight = nn.Parameter(net.weight.clone())
        >>> kept.replaced()
        'weight'
    """

    def __init__(
        self, module: nn.Module | None, *, modes: bool = False, settings: Callable[[], dict[str, object]] = dict
    ) -> None:
        self._module, self._modes, self._settings = module, modes, settings
        self.renew()

    def renew(self) -> None:
        """Guard the present entries from now on."""
        self._kept = self._held()

    def replaced(self) -> str | None:
        """Return the name of an entry that was replaced, added, removed or frozen, or computes otherwise; or None."""
        now = self._held()
        for name, (kept, state) in self._kept.items():
            found, after = now.pop(name, (None, None))
            if found is not kept or after != state:
                return name
        return next(iter(now), None)

    def _held(self) -> dict[str, tuple[object, object]]:
        """Return all objects by name, with the memory of tensors and the modes of modules."""
        held: dict[str, tuple[object, object]] = {
            name: (None, value) if isinstance(value, SETTINGS) else (value, None)
            for name, value in self._settings().items()
        }
        for path, part in () if self._module is None else self._module.named_modules():
            held[path] = part, _mode(part) if self._modes else None
            for owned in tensors_of(part):
                for name, tensor in owned.items():
                    if tensor is not None:
                        held[f"{path}.{name}" if path else name] = (
                            tensor,
                            (tensor.data_ptr(), tensor.stride(), tensor.requires_grad),
                        )
        return held


def _mode(module: nn.Module) -> object:
    """Return the comparable settings that a module's operations depend on, besides its modules and tensors."""
    own = {name: value for name, value in vars(module).items() if name[0] != "_" and isinstance(value, SETTINGS)}
    return own, hooks_of(module)


class GraphedFunction(Generic[T]):
    """A function of tensors that becomes a CUDA graph: one launch for all of its kernels, without Python in between.

    The first two calls run the function on a side stream, the third captures it, and it and later calls replay the
    graph. A replay repeats the captured kernels on the same memory: it reads weights and buffers in place, draws the
    random numbers that the function would draw, and gives bitwise equal results. Python code is not run again.

    Args:
        function: called with copies of the tensors, which it may change in place.
        device: the GPU.
        generators: random generators that the function draws from, in addition to that of the device.
        name: what the function is, for error messages.
        instead: what to do if it can't be captured, for error messages.
        guard: guard of what the function reads, renewed after the capture: the calls before it may create optimizer
            state, and modules that count their calls don't change any more.

    Attributes:
        memory: the copies that the function was last called with; those of the graph once it is captured. Calls with
            one of these tensors don't copy it.
    """

    def __init__(
        self,
        function: Callable[..., T],
        device: torch.device,
        *generators: torch.Generator,
        name: str,
        instead: str,
        guard: ModuleGuard | None = None,
    ) -> None:
        self._function, self._guard = function, guard
        self._device, self._generators = device, generators
        self._name, self._instead = name, instead
        self._warm = 0
        self._graph: tuple[Callable[[], None], T] | None = None
        self.memory: list[Tensor] = []

    def __call__(self, *tensors: Tensor) -> T:
        """Return the function's results; those of a graph are in memory that later calls overwrite.

        Raises:
            UsageError: the function can't be captured; the message names the line.
        """
        if self._warm < WARM_UP:
            self.memory = [tensor.clone() for tensor in tensors]
            with on_side_stream(self._device):
                results = self._function(*self.memory)
            self._warm += 1
            return results
        if self._graph is None:
            self.memory = [tensor.clone() for tensor in tensors]
            self._graph = self._capture()
            if self._guard is not None:
                self._guard.renew()
        else:
            self._fill(tensors)
        replay, results = self._graph
        replay()
        return results

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return self._graph is not None

    def discard(self) -> None:
        """Free the graph, so that the next call captures the function again."""
        self._graph, self.memory = None, []

    def _fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors to the memory of the graph, all of which are read before the first one is overwritten."""
        changed = [(kept, new) for kept, new in zip(self.memory, tensors, strict=True) if kept is not new]
        if changed:
            own = {kept.untyped_storage().data_ptr() for kept in self.memory}
            values = [new.clone() if new.untyped_storage().data_ptr() in own else new for _, new in changed]
            foreach_copy_([kept for kept, _ in changed], values)

    def _capture(self) -> tuple[Callable[[], None], T]:
        try:
            return record(lambda: self._function(*self.memory), self._device, *self._generators)
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise UsageError(
                f"The {self._name} can't be captured as a CUDA graph, as {_cause(error)}: don't wait for the GPU "
                "(.item(), .cpu(), `if` on a tensor, indexing by a mask, shapes that depend on data) or create tensors "
                f"from Python numbers; or {self._instead}."
            ) from error


def _cause(error: BaseException) -> str:
    """Return the line of user code that failed."""
    while error.__context__ is not None:  # ending a failed capture raises too
        error = error.__context__
    return line_of(traceback.extract_tb(error.__traceback__)) or "an operation waits for it"


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
    index = cast(int | None, device.index)
    index = torch.cuda.current_device() if index is None else index
    if index not in _streams.by_index:
        _streams.by_index[index] = torch.cuda.Stream(torch.device("cuda", index))
    return _streams.by_index[index]
