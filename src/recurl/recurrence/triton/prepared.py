"""Launches that remember what Triton compiled: its own look-up takes 10 to 40 microseconds of the host every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

_MOST_LAUNCHES = 1024
_MOST_KINDS = 256  # of one launch, such as lengths of a ragged stream
_ALIGNMENT = 16  # bytes, of which pointers are multiples or not in Triton's eyes


class Launch:
    """A kernel on a grid, with its constants; called with its other arguments in order, the first of them a tensor.

    Triton compiles a kernel for each kind of arguments: dtypes, alignment of pointers, some properties of numbers. Its
    look-up asks each argument; here the same dtypes, alignment and numbers mean the same kernel.

    Args:
        kernel: a function of Triton, compiled or interpreted.
        programs: the grid.
        constants: compile-time arguments, which come last in the kernel's signature, and options of the launch.
    """

    __slots__ = ("_constants", "_kernel", "_last", "_programs", "_runs")

    def __init__(self, kernel: Any, programs: tuple[int, ...], constants: dict[str, Any]) -> None:
        self._kernel, self._programs, self._constants = kernel, programs, constants
        self._last = [constants[name] for name in kernel.arg_names if name in constants]
        self._runs: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, *arguments: Any) -> None:
        """Start the kernel, on the current device and stream."""
        values: list[Any] = []
        kind: list[Any] = [arguments[0].device]
        for argument in arguments:
            if argument.__class__ is int:
                values.append(argument)
                kind.append(argument)
            else:
                pointer = argument.data_ptr()
                values.append(pointer)
                kind.append(argument.dtype)
                if pointer % _ALIGNMENT:
                    kind.append("unaligned")
        key = tuple(kind)
        run = self._runs.get(key)
        if run is None:
            self._prepare(key, arguments)
        else:
            run(*values, *self._last)

    def _prepare(self, key: tuple[Any, ...], arguments: tuple[Tensor | int, ...]) -> None:
        """Start the kernel as Triton does, and remember what ran."""
        compiled = self._kernel[self._programs](*arguments, **self._constants)
        if isinstance(compiled, CompiledKernel):  # else it was interpreted
            if len(self._runs) >= _MOST_KINDS:
                self._runs.clear()
            self._runs[key] = compiled[(*self._programs, 1, 1)[:3]]


_launches: dict[tuple[Any, ...], Launch] = {}


def prepared(kernel: Any, *programs: int, **constants: Any) -> Launch:
    """Return the launch of ``kernel`` on a grid, with its constants and options: see :class:`Launch`."""
    key = (id(kernel), programs, *constants, *constants.values())  # a function of Triton is slow to hash
    launch = _launches.get(key)
    if launch is None:
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        launch = _launches[key] = Launch(kernel, programs, constants)
    return launch
