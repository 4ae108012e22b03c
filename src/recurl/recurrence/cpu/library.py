"""Loader of the C++ library of the cpu backend, with its C structures and functions (``src/recurl_cpu.h``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from recurl.core.errors import UnsupportedError

LIBRARY = Path(__file__).with_name("librecurl_cpu.so")
"""Path of the library, which setup.py builds during installation if there is a C++ compiler."""

INSTRUCTION_SETS = ("portable", "avx2", "avx512")
"""Instruction sets in the order of ``enum recurl_isa``, slowest first."""

_ABI = 9
_INSTALL_HINT = (
    "Install a C++ compiler (g++ or clang++), then run pip install --force-reinstall --no-deps . in a checkout of "
    "recurl, or install recurl's wheel for Linux, which contains it"
)


class LayerStruct(ctypes.Structure):
    """``recurl_layer``, with the fields documented in ``src/recurl_cpu.h``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("cell", "dtype", "isa", "threads")),
        *((name, ctypes.c_int64) for name in ("tokens", "inputs", "hidden", "outputs")),
        ("starts", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr")),
        ("h0", ctypes.c_void_p),
        ("h0_stride", ctypes.c_int64),
        ("c0", ctypes.c_void_p),
        ("c0_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("gates", "h", "c", "unprojected")),
        ("grad_h", ctypes.c_void_p),
        ("grad_h_stride", ctypes.c_int64),
        ("grad_c", ctypes.c_void_p),
        ("grad_c_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("grad_gates", "grad_output", "h_before")),
        *((name, ctypes.c_void_p) for name in ("grad_x", "grad_h0", "grad_c0")),
        *((name, ctypes.c_void_p) for name in ("grad_w_ih", "grad_w_hh", "grad_b_ih", "grad_b_hh", "grad_w_hr")),
    )


class Linear(ctypes.Structure):
    """``recurl_linear``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("dtype", "isa", "threads", "tokens", "width", "is_complex")),
        ("starts", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("a_stride", ctypes.c_int64),
        ("b", ctypes.c_void_p),
        ("b_stride", ctypes.c_int64),
        ("states", ctypes.c_void_p),
        ("states_stride", ctypes.c_int64),
        ("h", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("grad_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("grad_a", "grad_b", "grad_states")),
    )


class Op(ctypes.Structure):
    """``recurl_op``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "variant", "source", "from_column", "inputs")),
        *((name, ctypes.c_int64) for name in ("to", "to_column", "outputs")),
        *((name, ctypes.c_void_p) for name in ("w", "b")),
        *((name, ctypes.c_double) for name in ("low", "high")),
        *((name, ctypes.c_void_p) for name in ("step", "layers")),
        ("slots", ctypes.c_int64 * 5),
    )


class ProgramStruct(ctypes.Structure):
    """``recurl_program``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("dtype", "isa", "given", "inner")),
        ("columns", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("ops", ctypes.c_void_p),
    )


class Memory(ctypes.Structure):
    """``recurl_memory``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "bytes", "row_stride", "step_stride")),
    )


class StructArguments:
    """Structure under construction, together with the tensors that it points to, which it keeps alive."""

    def __init__(self, structure: LayerStruct | Linear) -> None:
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
        """Call ``recurl_cpu_<function>`` on the structure, without holding the GIL."""
        check(getattr(load(), f"recurl_cpu_{function}")(ctypes.byref(self.structure)))


def check(status: int) -> None:
    """Raise an error for an ``enum recurl_status`` returned by the library."""
    if status == 1:
        raise MemoryError("The cpu backend could not allocate its working memory.")
    if status != 0:
        raise UnsupportedError("The cpu backend was called with an instruction set that this processor lacks.")


@cache
def missing() -> str | None:
    """Return why the library can't be used and what to do, or None."""
    if not LIBRARY.exists():
        return f"its compiled part {LIBRARY.name} was not built when recurl was installed. {_INSTALL_HINT}"
    try:
        found = ctypes.CDLL(str(LIBRARY)).recurl_cpu_abi()
    except (OSError, AttributeError) as error:
        return f"its compiled part can't be loaded ({error}). {_INSTALL_HINT}"
    if found != _ABI:
        return f"its compiled part has version {found}, recurl needs {_ABI}. {_INSTALL_HINT}"
    return None


@cache
def load() -> ctypes.CDLL:
    """Load the library. Call this only if :func:`missing` returns None."""
    return ctypes.CDLL(str(LIBRARY))


@cache
def step_function() -> Callable[[bytes, bytes], int]:
    """Return ``recurl_cpu_step``, which takes the bytes of a recurl_step and of its layers."""
    function = load().recurl_cpu_step
    function.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    return function


@cache
def run_function() -> Callable[[Any, bytes, int, int], int]:
    """Return ``recurl_cpu_run``, which takes a program, the bytes of its recurl_place array, rows and threads."""
    function = load().recurl_cpu_run
    function.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
    return function


@cache
def pass_functions() -> tuple[Callable[[Any, int], int], Callable[[bytes], int], Callable[[bytes], int]]:
    """Return ``recurl_cpu_pass_memory``, and ``_forward`` and ``_backward``, which take the bytes of a recurl_pass."""
    library = load()
    memory, forward, backward = (
        getattr(library, f"recurl_cpu_pass_{name}") for name in ("memory", "forward", "backward")
    )
    memory.argtypes, memory.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
    forward.argtypes = backward.argtypes = (ctypes.c_char_p,)
    return memory, forward, backward


@cache
def surrogate_function() -> Callable[[bytes, bytes], int]:
    """Return ``recurl_cpu_surrogate``, which takes the bytes of a recurl_pass and of a recurl_surrogate."""
    function = load().recurl_cpu_surrogate
    function.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    return function


@cache
def adam_function() -> Callable[[bytes], int]:
    """Return ``recurl_cpu_adam``, which takes the bytes of a recurl_adam."""
    function = load().recurl_cpu_adam
    function.argtypes = (ctypes.c_char_p,)
    return function


@cache
def write_function() -> Callable[[Any, int, bytes, int], None]:
    """Return ``recurl_cpu_write``, which takes an array of recurl_memory, a step, and pairs of index and address."""
    function = load().recurl_cpu_write
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)
    function.restype = None
    return function


@cache
def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that the library and this processor support, slowest first; empty if not built."""
    if missing() is not None:
        return ()
    has = load().recurl_cpu_has
    return tuple(name for isa, name in enumerate(INSTRUCTION_SETS) if has(ctypes.c_int64(isa)))
