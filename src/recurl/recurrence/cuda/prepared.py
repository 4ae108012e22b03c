"""Cached launches of compiled Triton kernels; Triton's look-up takes 10 to 40 microseconds of CPU time per launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

from recurl.core.errors import UnsupportedError
from recurl.recurrence.cuda.triton_compat import launch_of

_MOST_LAUNCHES = 1024
_MOST_KINDS = 256  # specializations of a launch, such as lengths of a ragged stream
_ALIGNMENT = 16  # bytes: Triton specializes kernels on pointer alignment


class PreparedLaunch:
    """A kernel with its grid and constants, called with its other arguments in order, the first of them a tensor.

    Triton specializes a kernel on dtypes, pointer alignment and some properties of integers, and inspects each argument
    at every launch. Here, equal dtypes, alignment and integers mean the same compiled kernel.

    Args:
        kernel: a Triton function, compiled or interpreted.
        programs: the grid.
        constants: compile-time arguments, which come last in the kernel's signature, and launch options.
    """

    __slots__ = ("_constants", "_kernel", "_last", "_programs", "_runs")

    def __init__(self, kernel: Any, programs: tuple[int, ...], constants: dict[str, Any]) -> None:
        self._kernel, self._programs, self._constants = kernel, programs, constants
        self._last = [constants[name] for name in kernel.arg_names if name in constants]
        self._runs: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, *arguments: Any) -> None:
        """Launch the kernel on the current device and stream."""
        device = arguments[0].device
        values: list[Any] = []
        kind: list[Any] = [device]
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
            run(device.index, *values, *self._last)

    def _prepare(self, key: tuple[Any, ...], arguments: tuple[Tensor | int, ...]) -> None:
        """Launch the kernel through Triton, and cache the compiled kernel.

        Raises:
            UnsupportedError: this GPU is too small for a program of the kernel.
        """
        try:
            compiled = self._kernel[self._programs](*arguments, **self._constants)
        except triton.OutOfResources as refused:
            raise UnsupportedError(
                f"At these sizes the GPU kernel needs {refused.required:,} ({refused.name}), the GPU has "
                f"{refused.limit:,}. Use fewer units per head or bfloat16, or another recurrent_backend, such as "
                "'chunked' or 'scan'."
            ) from refused
        run = launch_of(compiled, self._programs)
        if run is not None:  # else it is interpreted
            if len(self._runs) >= _MOST_KINDS:
                self._runs.clear()
            self._runs[key] = run


_launches: dict[tuple[Any, ...], PreparedLaunch] = {}


def prepared(kernel: Any, *programs: int, **constants: Any) -> PreparedLaunch:
    """Return the cached launch of ``kernel`` on a grid, with its constants and options: see :class:`PreparedLaunch`."""
    key = (id(kernel), programs, *constants, *constants.values())  # Triton functions are slow to hash
    launch = _launches.get(key)
    if launch is None:
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        launch = _launches[key] = PreparedLaunch(kernel, programs, constants)
    return launch
