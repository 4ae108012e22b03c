"""Launches of CUDA C++ kernels through the driver API. Imported only if Triton is installed."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import torch

from recurl.recurrence.cuda import nvrtc
from recurl.recurrence.cuda.triton_compat import current_stream, from_disk_cache


class CudaLaunch:
    """A CUDA C++ kernel with its grid and constants, called with its other arguments in order.

    Arguments are tensors, which include the first one, or integers. The kernel receives them in one structure of 64-bit
    words.

    Args:
        source: a source file, relative to this package.
        kernel: name of the kernel in that file.
        programs: CTAs of the grid.
        threads: threads per CTA.
        shared: bytes of dynamic shared memory per CTA.
        constants: macros.
    """

    __slots__ = ("_constants", "_functions", "_grid", "_kernel", "_shared")

    def __init__(
        self, source: str, kernel: str, programs: int, threads: int, shared: int, constants: dict[str, Any]
    ) -> None:
        self._kernel, self._grid, self._shared = (source, kernel), (programs, 1, 1, threads, 1, 1), shared
        self._constants = constants
        self._functions: dict[int, Any] = {}

    def __call__(self, *arguments: Any) -> None:
        """Launch the kernel on the current device and stream."""
        device = arguments[0].device.index
        function = self._functions.get(device)
        if function is None:
            function = self._functions[device] = self._load()
        words = [value if value.__class__ is int else value.data_ptr() for value in arguments]
        structure = (ctypes.c_int64 * len(words))(*words)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(structure))
        stream = current_stream(device)
        status = _driver().cuLaunchKernel(function, *self._grid, self._shared, stream, parameters, None)
        _check("cuLaunchKernel", status)

    def _load(self) -> ctypes.c_void_p:
        function = _function(*self._kernel, torch.cuda.current_device(), **self._constants)
        _allow_shared(function, self._shared)
        return function


@cache
def _function(source: str, kernel: str, device: int, **constants: Any) -> ctypes.c_void_p:
    """Return the compiled kernel, loaded on the current device."""
    code = machine_code(source, constants, architecture_of(device))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check("cuModuleLoadData", _driver().cuModuleLoadData(ctypes.byref(module), code))
    _check("cuModuleGetFunction", _driver().cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()))
    return function


def _allow_shared(function: ctypes.c_void_p, size: int) -> None:
    _check("cuFuncSetAttribute", _driver().cuFuncSetAttribute(function, _MOST_SHARED, size))


def architecture_of(device: int) -> str:
    """Return the architecture of a GPU as NVRTC names it, such as ``"sm_90"``."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def machine_code(source: str, constants: dict[str, Any], architecture: str) -> bytes:
    """Return the machine code of a source file, from Triton's disk cache if it was compiled before."""
    key = nvrtc.identity(source, constants, architecture)
    return from_disk_cache(
        key, f"{PurePosixPath(source).name}bin", lambda: nvrtc.compiled(source, constants, architecture)[0]
    )


_ALONE = 120 * 1024  # bytes of shared memory: more than half of a multiprocessor's, so that a CTA is alone on it
_MOST_SHARED, _CLUSTER = 8, 4  # codes of CUDA's function and launch attributes


class _Attribute(ctypes.Structure):
    _fields_ = (("name", ctypes.c_int), ("", ctypes.c_int), ("size", ctypes.c_uint * 3), ("rest", ctypes.c_uint * 13))


class _Config(ctypes.Structure):
    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("threads", ctypes.c_uint * 3), ("shared", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint)),
    )


@cache
def can_compile_on(device: torch.device) -> bool:
    """Return whether an empty kernel can be compiled and loaded; if not, a warning states the reason."""
    try:
        _nothing(device)
    except RuntimeError as error:
        warnings.warn(f"CUDA C++ kernels can't be compiled for {device}, which runs others: {error}", stacklevel=2)
        return False
    return True


def _nothing(device: torch.device) -> ctypes.c_void_p:
    with torch.cuda.device(device):
        torch.empty(1, device=device)  # the driver API needs the context that torch creates at its first use
        return _function("nothing.cu", "nothing_kernel", torch.cuda.current_device())


@cache
def clusters_on(device: torch.device, sizes: tuple[int, ...], shared: int) -> tuple[int, ...]:
    """Return how many clusters of each size a GPU holds at once, with each CTA alone on a multiprocessor.

    That is less than the number of multiprocessors divided by the size, because CTAs of a cluster must be neighbors.
    ``shared``: most bytes of shared memory of a CTA.
    """
    function, alone = _nothing(device), min(_ALONE, shared)
    with torch.cuda.device(device):
        _allow_shared(function, alone)
        return tuple(_clusters_of(function, members, alone) for members in sizes)


def _clusters_of(function: ctypes.c_void_p, members: int, shared: int) -> int:
    attribute = _Attribute(_CLUSTER, 0, (members, 1, 1))
    three = ctypes.c_uint * 3
    config = _Config(three(members, 1, 1), three(256, 1, 1), shared, None, ctypes.pointer(attribute), 1)
    found = ctypes.c_int()
    status = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), function, ctypes.byref(config))
    return 0 if status else found.value


@cache
def _driver() -> ctypes.CDLL:
    found = ctypes.CDLL("libcuda.so.1")
    numbers = [ctypes.c_uint] * 7
    found.cuLaunchKernel.argtypes = [ctypes.c_void_p, *numbers, *[ctypes.c_void_p] * 3]
    return found


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed with CUDA's error {status}")
