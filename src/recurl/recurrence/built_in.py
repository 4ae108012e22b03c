"""The built-in implementations of the operations by name, each imported on first use, and their operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.library import Library

from recurl.recurrence.backend import BACKENDS, OperatorSupport, Registry
from recurl.recurrence.operation import Operation
from recurl.sequences.index import Boundaries

if TYPE_CHECKING:
    from recurl.recurrence.attention.kernels import AttentionKernels
    from recurl.recurrence.linear.kernels import LinearKernels
    from recurl.recurrence.matrix.kernels import MatrixKernels

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
_KERNELS = {
    "linear": {
        "loop": "linear.loop:LoopLinear",
        "scan": "linear.scan:ScanLinear",
        "cpu": "cpu.linear:CpuLinear",
        "triton": "cuda.linear.backend:TritonLinear",
        "reference": "linear.loop:ReferenceLinear",
    },
    "matrix": {
        "loop": "matrix.loop:LoopMatrix",
        "chunked": "matrix.chunked:ChunkedMatrix",
        "cpu": "matrix.chunked:ChunkedMatrix",
        "triton": "cuda.matrix.backend:TritonMatrix",
        "reference": "matrix.loop:ReferenceMatrix",
    },
    "attention": {
        "chunked": "attention.chunked:ChunkedAttention",
        "loop": "attention.chunked:ChunkedAttention",
        "scan": "attention.chunked:ChunkedAttention",
        "cpu": "attention.chunked:ChunkedAttention",
        "triton": "cuda.attention.backend:TritonAttention",
        "reference": "attention.reference:ReferenceAttention",
    },
}
_DIFFERENTIATED = {
    "linear": {"reference"},
    "matrix": {"reference", "loop", "chunked", "cpu"},
    "attention": {"reference"},
}
"""Kernels of operations of torch, whose derivatives are those of torch."""
LINEAR: Registry[LinearKernels, OperatorSupport] = Registry(
    "The backend of a linear recurrence", "The backend", "linear recurrence"
)
MATRIX: Registry[MatrixKernels, OperatorSupport] = Registry(
    "The backend of a matrix recurrence", "The backend", "matrix recurrence", traced="chunked"
)
ATTENTION: Registry[AttentionKernels, OperatorSupport] = Registry(
    "The backend of windowed attention", "The backend", "windowed attention"
)
OPERATIONS: dict[str, Operation] = {}
"""Operations of all other kernels, by operator and name, as in ``linear_loop``."""


def _make(path: str, *args: Any) -> Any:
    """Construct the class at ``module:Class``, relative to this package."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"recurl.recurrence.{module}"), name)(*args)


def _make_of(path: str, load: Callable[[], Any], *args: Any) -> Any:
    return _make(path, load(), *args)


for _name, (_path, _kernels) in _LAYERS.items():
    if _kernels is None:
        _load = partial(_make, _path)
    else:
        _of_kernels = cache(partial(_make, _kernels))
        _load = partial(_make_of, _path, _of_kernels, Operation(_name, _of_kernels))
    BACKENDS.add(_name, _load, _DEVICES.get(_name), fast=_name in _DEVICES)
_REGISTRIES: dict[str, Registry[Any, OperatorSupport]] = {"linear": LINEAR, "matrix": MATRIX, "attention": ATTENTION}
for _operator, _registry in _REGISTRIES.items():
    for _name, _path in _KERNELS[_operator].items():
        _given = (_name,) if _operator == "attention" else ()
        _fast = _name == "triton" or (_name == "cpu" and _operator != "attention")
        _registry.add(_name, partial(_make, _path, *_given), _DEVICES.get(_name), _fast)
        if _name not in _DIFFERENTIATED[_operator]:
            _load = partial(_make_of, f"{_operator}.operator:LayerKernels", partial(_registry.named, _name))
            OPERATIONS[f"{_operator}_{_name}"] = Operation(
                _name, _load, f"{_operator}_{_name}", closed=_operator == "linear"
            )
            if _operator == "linear":
                BACKENDS.add_linear(_name, partial(_make, "segments:LinearBackend", _name))


def _linear_recurrence(a: Tensor, b: Tensor, states: Tensor, starts: Tensor, length: int, backend: str) -> Tensor:
    run = import_module("recurl.recurrence.linear").linear_recurrence
    return run(a, b, states, Boundaries(starts, (length,)), backend)


# Programs that were exported by version 0.2.0 contain this operator.
_library = Library("recurl", "FRAGMENT")
_library.define(
    "linear_recurrence(Tensor a, Tensor b, Tensor states, Tensor starts, SymInt length, str backend) -> Tensor"
)
_library.impl("linear_recurrence", _linear_recurrence, "CompositeImplicitAutograd")
