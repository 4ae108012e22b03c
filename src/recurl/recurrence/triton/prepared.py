"""Launches that remember what Triton compiled: its own look-up takes 20 to 40 microseconds of the host every time."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

_MOST_KINDS = 256  # of one launch, such as lengths of a ragged stream
_ALIGNMENT = 16  # bytes, of which pointers are multiples or not in Triton's eyes


class Launch:
    """A kernel on a grid, with its constants; called with its other arguments in order.

    Triton compiles a kernel for each kind of arguments: dtypes, alignment of pointers, some properties of numbers. Its
    look-up asks each argument; here the same dtypes, alignment and numbers mean the same kernel.

    Args:
        kernel: a function of Triton, compiled or interpreted.
        programs: the grid.
        constants: compile-time arguments, which come last in the kernel's signature, and options of the launch.
    """

    def __init__(self, kernel: Any, programs: tuple[int, ...], constants: dict[str, Any]) -> None:
        self._launch = kernel[programs]
        self._programs = (*programs, 1, 1)[:3]
        self._constants = constants
        self._last = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._prepared: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, *arguments: Tensor | int | float) -> None:
        """Start the kernel, on the current device and stream."""
        values: list[Any] = []
        kind: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                pointer = argument.data_ptr()
                values.append(pointer)
                kind.append(argument.dtype)
                if pointer % _ALIGNMENT:
                    kind.append("unaligned")
            else:
                values.append(argument)
                kind.append(argument)
        key = (arguments[0].device, *kind)  # pyright: ignore[reportAttributeAccessIssue] - a tensor comes first
        run = self._prepared.get(key)
        if run is None:
            self._prepare(key, arguments)
        else:
            run(*values, *self._last)

    def _prepare(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        """Start the kernel as Triton does, and remember what it ran."""
        compiled = self._launch(*arguments, **self._constants)
        if isinstance(compiled, CompiledKernel):  # not in the interpreter
            if len(self._prepared) >= _MOST_KINDS:
                self._prepared.clear()
            self._prepared[key] = compiled[self._programs]


@lru_cache(maxsize=1024)
def prepared(kernel: Any, *programs: int, **constants: Any) -> Launch:
    """Return the launch of ``kernel`` on a grid, with its constants and options: see :class:`Launch`."""
    return Launch(kernel, programs, constants)
