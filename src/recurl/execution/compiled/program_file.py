"""Files of compiled functions: a NumPy archive of the builder calls that make the program, as JSON, and its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.ranges import shown
from recurl.execution.compiled.function import CompiledFunction, Port
from recurl.native.program import ProgramBuilder, Value
from recurl.recurrence import CELLS, Cell, LayerWeights

__all__ = ["Recorder", "read_function", "write_function"]

_PROGRAM = "program"
_OPERATIONS = frozenset(name for name in vars(ProgramBuilder) if not name.startswith("_") and name != "finish")


class Recorder:
    """Wrapper of a :class:`ProgramBuilder` that records the calls of its methods.

    Args:
        dtype: dtype of the program.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.builder = ProgramBuilder(dtype)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.builder, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            return method(*arguments, **options)

        return method if name == "finish" else call


def write_function(function: CompiledFunction, recorder: Recorder, path: Path) -> None:
    """Write a function whose program was built by ``recorder``, with the present values of its weights."""
    weights: list[Tensor] = []
    about = {
        "dtype": _encoded(recorder.builder.dtype, weights),
        "calls": [
            [name, _encoded(given, weights), _encoded(options, weights)] for name, given, options in recorder.calls
        ],
        "ports": [[_port(port) for port in ports] for ports in (function.inputs, function.outputs, function.unused)],
    }
    arrays = {f"weight_{number}": weight.detach().numpy() for number, weight in enumerate(weights)}
    with path.open("wb") as file:
        np.savez(file, **{_PROGRAM: np.frombuffer(json.dumps(about).encode(), np.uint8)}, **arrays)  # pyright: ignore[reportArgumentType] - of another argument


def read_function(path: Path) -> CompiledFunction:
    """Read a function written by :func:`write_function`.

    Raises:
        ArgumentError: the file names anything but the operations of a program.
    """
    with np.load(path, allow_pickle=False) as archive:
        about = json.loads(archive[_PROGRAM].tobytes())
        weights = {name: torch.from_numpy(archive[name]) for name in archive.files if name != _PROGRAM}
    builder = ProgramBuilder(_decoded(about["dtype"], weights))
    for name, given, options in about["calls"]:
        if name not in _OPERATIONS:
            raise ArgumentError(f"{path} names {shown(name)}, not an operation of a policy: export the run again.")
        getattr(builder, name)(*_decoded(given, weights), **_decoded(options, weights))
    ports = [
        [Port(slot, tuple(shape), _decoded(dtype, weights)) for slot, shape, dtype in part] for part in about["ports"]
    ]
    return CompiledFunction(builder.finish(), *ports)


def _port(port: Port) -> list[Any]:
    return [port.slot, list(port.shape), _encoded(port.dtype, [])]


def _encoded(value: Any, weights: list[Tensor]) -> Any:
    """Encode an argument for JSON; weights are appended to ``weights``."""
    match value:
        case Value():
            return {"value": list(value)}
        case Tensor():
            weights.append(value)
            return {"weight": f"weight_{len(weights) - 1}"}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case Cell():
            return {"cell": value.name}
        case LayerWeights():
            return {"layer": [_encoded(weight, weights) for weight in value]}
        case Mapping():
            return {"options": {name: _encoded(option, weights) for name, option in value.items()}}
        case str() | None | int() | float():
            return value
        case Sequence():
            return [_encoded(part, weights) for part in value]
        case _:
            raise TypeError(f"{type(value).__name__} is not an argument of a ProgramBuilder")


def _decoded(value: Any, weights: Mapping[str, Tensor]) -> Any:
    match value:
        case {"value": place}:
            return Value(*place)
        case {"weight": name}:
            return weights[name]
        case {"dtype": name}:
            return getattr(torch, name)
        case {"cell": name}:
            return CELLS[name]
        case {"layer": parts}:
            return LayerWeights(*(_decoded(part, weights) for part in parts))
        case {"options": options}:
            return {name: _decoded(option, weights) for name, option in options.items()}
        case list():
            return [_decoded(part, weights) for part in value]
        case _:
            return value
