"""Readers and writers of the file formats for exported policies."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from recurl.core.archive import damage
from recurl.core.errors import ArgumentError, MissingDependencyError, UnsupportedError
from recurl.core.keys import IS_INIT, next_key
from recurl.core.messages import quiet
from recurl.core.torch_compat import EXPORT_LOGGER
from recurl.execution.compiled import Recorder, function_of, read_function, write_function
from recurl.execution.lowering import Network
from recurl.native.library import missing
from recurl.sequences.entries import Entries
from recurl.sequences.mode import ExplorationType, set_exploration_type
from recurl.trainers.export.policy_step import PolicyStep
from recurl.trainers.export.verification import Function

_ONNX = ("onnx", "onnxscript", "onnxruntime")


@contextmanager
def _quietly() -> Generator[None]:
    """Silence torch's exporters."""
    with quiet(EXPORT_LOGGER, logging.ERROR):
        yield


def _program(policy: PolicyStep, example: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    with _quietly(), torch.no_grad():
        return torch.export.export(policy, example, dynamic_shapes=(tuple({0: batch} for _ in example),), strict=False)


def _write_torch(policy: PolicyStep, example: tuple[Tensor, ...], path: Path) -> None:
    with _quietly():
        torch.export.save(_program(policy, example), path)


def _read_torch(path: Path) -> Function:
    data = path.read_bytes()
    wrong = damage(data)
    if wrong is not None:
        raise ArgumentError(f"{path} is damaged ({wrong}): export the run again.")
    with _without_pickles():
        function = torch.export.load(BytesIO(data)).module()
    return lambda arguments: function(*arguments)


@contextmanager
def _without_pickles() -> Generator[None]:
    """Restrict ``torch.load`` to tensors and plain values inside the block.

    Otherwise ``torch.export.load`` falls back to unpickling arbitrary objects.
    """
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    except UnpicklingError as error:
        raise ArgumentError(
            "An exported policy must contain a program and tensors only, but this one contains objects that would "
            "run code: export the run again."
        ) from error
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _write_onnx(policy: PolicyStep, example: tuple[Tensor, ...], path: Path) -> None:
    onnx = importlib.import_module("torch.onnx")
    with _quietly():
        written = onnx.export(
            _program(policy, example),
            input_names=policy.inputs,
            output_names=policy.outputs,
            dynamo=True,
            verbose=False,
        )
        for value in (*written.model.graph.inputs, *written.model.graph.outputs):
            value.shape[0] = "batch"
        written.save(path, external_data=False)


def _read_onnx(path: Path) -> Function:
    session = _import("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def function(arguments: Sequence[Tensor]) -> list[Tensor]:
        feed = {name: value.contiguous().numpy() for name, value in zip(names, arguments, strict=True)}
        return [torch.from_numpy(result) for result in session.run(None, feed)]

    return function


def _write_compiled(policy: PolicyStep, example: tuple[Tensor, ...], path: Path) -> None:
    keys = (*policy.observations, IS_INIT, *policy.states)
    entries = Entries({}, example[0].shape[:1])
    for key, value in zip(keys, example, strict=True):
        entries.set(key, value)
    recorders: list[Recorder] = []

    def record(dtype: torch.dtype) -> Recorder:
        recorders.append(Recorder(dtype))
        return recorders[-1]

    outputs = (*policy.actions, *map(next_key, policy.states))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        try:
            function = function_of(Network([policy.actor]), entries, keys, outputs, record)
        except UnsupportedError as error:
            raise UnsupportedError(f"{error} Export it in another format, torch or onnx.") from error
    write_function(function, recorders[-1], path)


def _read_compiled(path: Path) -> Function:
    data = path.read_bytes()
    wrong = damage(data)
    if wrong is not None:
        raise ArgumentError(f"{path} is damaged ({wrong}): export the run again.")
    return read_function(path)


def _require_library() -> None:
    absent = missing()
    if absent is not None:
        raise MissingDependencyError(f"A policy can't be compiled: {absent}")


def _require_onnx() -> None:
    for package in _ONNX:
        _import(package)


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(f"{package} is not installed: pip install 'recurl[export]'") from error


@dataclass(frozen=True)
class Format:
    """Reader and writer of a file format."""

    suffix: str
    """File name suffix."""
    check: Callable[[], None]
    """Raise MissingDependencyError if a required package is missing."""
    write: Callable[[PolicyStep, tuple[Tensor, ...], Path], None]
    """Write a policy, given example arguments of a step."""
    read: Callable[[Path], Function]
    """Read the function back."""


FORMATS = {
    "torch": Format(".pt2", lambda: None, _write_torch, _read_torch),
    "onnx": Format(".onnx", _require_onnx, _write_onnx, _read_onnx),
    "compiled": Format(".recurl", _require_library, _write_compiled, _read_compiled),
}
