"""The built-in implementations of the operations by name, each imported on first use, and their operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.library import Library

from recurl.recurrence.backend import ATTENTION, BACKENDS, LINEAR, MATRIX
from recurl.recurrence.operation import Operation
from recurl.sequences.index import Boundaries

_DEVICES = {"cpu": "cpu", "triton": "cuda"}
"""The only device of a backend; ``"fastest"`` selects one of these, the last first."""
_LAYERS = {
    "pad": ("pad:PadBackend", None),
    "loop": ("kernel_backend:AutogradBackend", "loop:LoopKernels"),
    "cpu": ("kernel_backend:KernelBackend", "cpu.kernels:CpuKernels"),
    "triton": ("kernel_backend:KernelBackend", "cuda.backend:TritonKernels"),
    "scan": ("scan:ScanBackend", "scan:ScanKernels"),
    "reference": ("reference:ReferenceBackend", None),
}
_LINEAR = {
    "loop": "linear.loop:LoopLinear",
    "scan": "linear.scan:ScanLinear",
    "cpu": "cpu.linear:CpuLinear",
    "triton": "cuda.linear.backend:TritonLinear",
    "reference": "linear.loop:ReferenceLinear",
}
_MATRIX = {
    "loop": "matrix.loop:LoopMatrix",
    "chunked": "matrix.chunked:ChunkedMatrix",
    "cpu": "matrix.chunked:ChunkedMatrix",
    "triton": "matrix.fused:FusedMatrix",
    "reference": "matrix.loop:ReferenceMatrix",
}
_MATRIX_KERNELS = {"triton": "cuda.matrix.backend:TritonMatrix"}
_ATTENTION = {
    "chunked": "attention.chunked:ChunkedAttention",
    "loop": "attention.chunked:ChunkedAttention",
    "scan": "attention.chunked:ChunkedAttention",
    "cpu": "attention.chunked:ChunkedAttention",
    "triton": "cuda.attention.backend:TritonAttention",
    "reference": "attention.reference:ReferenceAttention",
}
LINEAR_OPERATIONS: dict[str, Operation] = {}
"""Operations of the kernels of linear recurrences, by name."""
MATRIX_KERNELS: dict[str, Callable[[], Any]] = {}
"""Functions that import the kernels of matrix recurrences, by name."""
MATRIX_OPERATIONS: dict[str, Operation] = {}
"""Their operations."""
ATTENTION_OPERATIONS: dict[str, Operation] = {}
"""Operations of the kernels of windowed attention, by name."""


def _make(path: str, *args: Any) -> Any:
    """Construct the class at ``module:Class``, relative to this package."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"recurl.recurrence.{module}"), name)(*args)


def _make_backend(path: str, load: Callable[[], Any], operation: Operation) -> Any:
    return _make(path, load(), operation)


for _name, (_path, _kernels) in _LAYERS.items():
    if _kernels is None:
        _load = partial(_make, _path)
    else:
        _of_kernels = cache(partial(_make, _kernels))
        _load = partial(_make_backend, _path, _of_kernels, Operation(_name, _of_kernels))
    BACKENDS.add(_name, _load, _DEVICES.get(_name), fast=_name in _DEVICES)
for _name, _path in _LINEAR.items():
    LINEAR.add(_name, partial(_make, _path), _DEVICES.get(_name), fast=_name in _DEVICES)
    if _name != "reference":  # the reference backend steps through every cell itself
        _of_kernels = partial(_make, "linear.operator:LayerKernels", _name)
        LINEAR_OPERATIONS[_name] = Operation(_name, _of_kernels, f"linear_{_name}", closed=True)
        BACKENDS.add_linear(_name, partial(_make, "segments:LinearBackend", _name))
for _name, _path in _MATRIX.items():
    if _name in _MATRIX_KERNELS:
        MATRIX_KERNELS[_name] = cache(partial(_make, _MATRIX_KERNELS[_name]))
        _of_kernels = partial(_make, "matrix.fused:LayerKernels", _name)
        MATRIX_OPERATIONS[_name] = Operation(_name, _of_kernels, f"matrix_{_name}")
        MATRIX.add(_name, partial(_make, _path, _name), _DEVICES.get(_name), fast=True)
    else:
        MATRIX.add(_name, partial(_make, _path), _DEVICES.get(_name), fast=_name in _DEVICES)
for _name, _path in _ATTENTION.items():
    _of_kernels = cache(partial(_make, _path, _name))
    ATTENTION.add(_name, _of_kernels, _DEVICES.get(_name), fast=_name == "triton")
    if _name != "reference":
        _in_operation = partial(_make, "attention.operator:LayerKernels", _name)
        ATTENTION_OPERATIONS[_name] = Operation(_name, _in_operation, f"attention_{_name}")


def _linear_recurrence(a: Tensor, b: Tensor, states: Tensor, starts: Tensor, length: int, backend: str) -> Tensor:
    run = import_module("recurl.recurrence.linear").linear_recurrence
    return run(a, b, states, Boundaries(starts, (length,)), backend)


# Programs that were exported by version 0.2.0 contain this operator.
_library = Library("recurl", "FRAGMENT")
_library.define(
    "linear_recurrence(Tensor a, Tensor b, Tensor states, Tensor starts, SymInt length, str backend) -> Tensor"
)
_library.impl("linear_recurrence", _linear_recurrence, "CompositeImplicitAutograd")
