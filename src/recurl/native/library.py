"""Loader of the C++ library, with its functions (``src/recurl_native.h``) and the errors that they report."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recurl.core.errors import UnsupportedError
from recurl.core.torch_compat import are_modes_active, is_compiling, is_forward_mode, is_functorch_active
from recurl.native.structures import STRUCTURES, Layer, Linear

LIBRARY = Path(os.environ.get("RECURL_NATIVE_LIBRARY") or Path(__file__).with_name("librecurl_native.so"))
"""Path of the library, which setup.py builds during installation if there is a C++ compiler.

The environment variable ``RECURL_NATIVE_LIBRARY`` names another one, such as the one that ``make sanitize`` builds.
"""

INSTRUCTION_SETS = ("portable", "avx2", "avx512")
"""Instruction sets in the order of ``enum recurl_isa``, slowest first."""

CELLS = {"lstm": 0, "gru": 1}
"""Cells of layers and steps: ``enum recurl_cell``."""

DTYPES = {torch.float32: 0, torch.float64: 1}
"""Dtypes of computations: ``enum recurl_dtype``, whose bfloat16 only linear recurrences have."""

PLAIN_TYPES = (Tensor, nn.Parameter)
"""Types of tensors that the library reads and writes; others may override torch's operations."""

_ABI = 11
_INSTALL_HINT = (
    "Install a C++ compiler (g++ or clang++), then run pip install --force-reinstall --no-deps . in a checkout of "
    "recurl, or install recurl's wheel for Linux, which contains it"
)


class StructArguments:
    """Structure under construction, together with the tensors that it points to, which it keeps alive."""

    def __init__(self, structure: Layer | Linear) -> None:
        self.structure = structure
        self._tensors: list[Tensor] = []

    def set_numbers(self, **values: int) -> None:
        """Set integer fields."""
        for name, value in values.items():
            setattr(self.structure, name, value)

    def set_contiguous(self, names: Sequence[str], tensors: Iterable[Tensor | None]) -> None:
        """Point fields at contiguous copies of tensors, or the tensors themselves; None stays a null pointer.

        There may be fewer tensors than ``names``.
        """
        for name, tensor in zip(names, tensors, strict=False):
            if tensor is not None:
                tensor = tensor.contiguous()
                self._tensors.append(tensor)
                setattr(self.structure, name, tensor.data_ptr())

    def set_rows(self, names: Sequence[str], tensors: Iterable[Tensor]) -> None:
        """Point fields at matrices and set their ``_stride`` to the row stride, so that expanded rows aren't copied.

        There may be fewer tensors than ``names``.
        """
        for name, tensor in zip(names, tensors, strict=False):
            if tensor.stride(1) != 1 and tensor.shape[1] != 1:
                tensor = tensor.contiguous()
            self._tensors.append(tensor)
            setattr(self.structure, name, tensor.data_ptr())
            setattr(self.structure, f"{name}_stride", tensor.stride(0))

    def call(self, function: str) -> None:
        """Call ``recurl_native_<function>`` on the structure, without holding the GIL."""
        check(getattr(load(), f"recurl_native_{function}")(ctypes.byref(self.structure)))


def check(status: int) -> None:
    """Raise an error for an ``enum recurl_status`` returned by the library."""
    if status == 1:
        raise MemoryError("The C++ library could not allocate its working memory.")
    if status != 0:
        raise UnsupportedError("The C++ library was called with an instruction set that this processor lacks.")


@cache
def missing() -> str | None:
    """Return why the library can't be used and what to do, or None."""
    if not LIBRARY.exists():
        return f"its compiled part {LIBRARY.name} was not built when recurl was installed. {_INSTALL_HINT}"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        found = library.recurl_native_abi()
        if found != _ABI:
            return f"its compiled part has version {found}, recurl needs {_ABI}. {_INSTALL_HINT}"
        sizes = library.recurl_native_sizes
    except (OSError, AttributeError) as error:
        return f"its compiled part can't be loaded ({error}). {_INSTALL_HINT}"
    sizes.restype = ctypes.POINTER(ctypes.c_int64)
    for (name, structure), size in zip(STRUCTURES.items(), sizes(), strict=False):
        if size != ctypes.sizeof(structure):
            return (
                f"in its compiled part {name} has {size} bytes, recurl needs {ctypes.sizeof(structure)}. "
                f"{_INSTALL_HINT}"
            )
    return None


@cache
def load() -> ctypes.CDLL:
    """Load the library. Call this only if :func:`missing` returns None."""
    return ctypes.CDLL(str(LIBRARY))


@cache
def step_function() -> Callable[[bytes, bytes], int]:
    """Return ``recurl_native_step``, which takes the bytes of a recurl_step and of its layers."""
    function = load().recurl_native_step
    function.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    return function


@cache
def run_function() -> Callable[[Any, bytes, int, int], int]:
    """Return ``recurl_native_run``, which takes a program, the bytes of its recurl_place array, rows and threads."""
    function = load().recurl_native_run
    function.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
    return function


@cache
def pass_functions() -> tuple[Callable[[Any, int], int], Callable[[bytes], int], Callable[[bytes], int]]:
    """Return ``recurl_native_pass_memory``, ``_forward`` and ``_backward``; the latter take bytes of a recurl_pass."""
    library = load()
    memory, forward, backward = (
        getattr(library, f"recurl_native_pass_{name}") for name in ("memory", "forward", "backward")
    )
    memory.argtypes, memory.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
    forward.argtypes = backward.argtypes = (ctypes.c_char_p,)
    return memory, forward, backward


@cache
def surrogate_function() -> Callable[[bytes, bytes], int]:
    """Return ``recurl_native_surrogate``, which takes the bytes of a recurl_pass and of a recurl_surrogate."""
    function = load().recurl_native_surrogate
    function.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    return function


@cache
def adam_function() -> Callable[[bytes], int]:
    """Return ``recurl_native_adam``, which takes the bytes of a recurl_adam."""
    function = load().recurl_native_adam
    function.argtypes = (ctypes.c_char_p,)
    return function


@cache
def write_function() -> Callable[[Any, int, bytes, int], None]:
    """Return ``recurl_native_write``, which takes an array of recurl_memory, a step, and pairs of index and address."""
    function = load().recurl_native_write
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)
    function.restype = None
    return function


@cache
def hunt_and_kill_function() -> Callable[[int, int, int, int, int, int, int], int]:
    """Return ``recurl_native_hunt_and_kill``, which takes a side, rows, starts, chances, two strides and squares."""
    function = load().recurl_native_hunt_and_kill
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = (integer, integer, pointer, pointer, integer, integer, pointer)
    return function


@cache
def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that the library and this processor support, slowest first; empty if not built."""
    if missing() is not None:
        return ()
    has = load().recurl_native_has
    return tuple(name for isa, name in enumerate(INSTRUCTION_SETS) if has(ctypes.c_int64(isa)))


def can_call() -> bool:
    """Return whether tensors may be passed to the library: it is available and nothing tracks torch's operations.

    Autograd, tracing, function transforms and dispatch modes can't see calls of the library.
    """
    return (
        not torch.is_grad_enabled()
        and not is_compiling()
        and not is_functorch_active()
        and not is_forward_mode()
        and not are_modes_active()
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - documented under this name
        and bool(instruction_sets())
    )
