"""Complete networks as functions of tensors or arrays: one call of the C++ library for any number of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import NestedKey
from recurl.execution.compiled.compilation import Compilation
from recurl.execution.compiled.network import write_all
from recurl.execution.explain import NotCompiled
from recurl.execution.lowering import Network
from recurl.native.library import missing
from recurl.native.program import Program
from recurl.sequences.entries import Entries

__all__ = ["CompiledFunction", "OneRow", "Port", "function_of"]


class Port(NamedTuple):
    """An argument or a result of a compiled function.

    Attributes:
        slot: its slot in the program.
        shape: shape of one row.
        dtype: its dtype.
    """

    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def columns(self) -> int:
        """Numbers in a row."""
        return math.prod(self.shape)


class CompiledFunction:
    """A program of the C++ library as a function of tensors ``[n, ...]``.

    Args:
        program: the program.
        inputs: its arguments, in order.
        outputs: its results, in order.
        unused: further outputs of the program, which are discarded.
    """

    def __init__(
        self, program: Program, inputs: Sequence[Port], outputs: Sequence[Port], unused: Sequence[Port] = ()
    ) -> None:
        self.program = program
        self.inputs, self.outputs, self.unused = tuple(inputs), tuple(outputs), tuple(unused)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the results for ``tensors``.

        Raises:
            ArgumentError: a tensor has another dtype or size than the function takes.
        """
        rows = len(tensors[0])
        places = [0] * (2 * len((*self.inputs, *self.outputs, *self.unused)))
        given = [_fitting(tensor, port, rows) for tensor, port in zip(tensors, self.inputs, strict=True)]
        results = [torch.empty(rows, *port.shape, dtype=port.dtype) for port in (*self.outputs, *self.unused)]
        ports = (*self.inputs, *self.outputs, *self.unused)
        for tensor, port in zip([*given, *results], ports, strict=True):
            places[2 * port.slot], places[2 * port.slot + 1] = tensor.data_ptr(), port.columns
        self.program(places, rows)  # it draws no random numbers, so it can't refuse to run
        return results[: len(self.outputs)]

    def one_row(self) -> OneRow:
        """Return the function of arrays without a batch dimension."""
        return OneRow(self)


def _fitting(tensor: Tensor, port: Port, rows: int) -> Tensor:
    if tensor.dtype is not port.dtype or tensor.numel() != rows * port.columns or not tensor.is_cpu:
        raise ArgumentError(
            f"A compiled function takes {port.dtype} of shape {[rows, *port.shape]}, got {tensor.dtype} of shape "
            f"{list(tensor.shape)} on {tensor.device}."
        )
    return tensor.contiguous()


class OneRow:
    """A function of one row with its own buffers for arguments and results, for one thread at a time.

    Args:
        function: the function for any number of rows.

    Attributes:
        inputs: arrays to write the arguments to.
        outputs: arrays that hold the results after a run.
        run: computes the results.
    """

    def __init__(self, function: CompiledFunction) -> None:
        ports = (*function.inputs, *function.outputs, *function.unused)
        arrays = [torch.zeros(port.shape, dtype=port.dtype).numpy() for port in ports]
        self.inputs: list[NDArray[Any]] = arrays[: len(function.inputs)]
        self.outputs: list[NDArray[Any]] = arrays[len(function.inputs) :][: len(function.outputs)]
        places = [0] * (2 * len(ports))
        for array, port in zip(arrays, ports, strict=True):
            places[2 * port.slot], places[2 * port.slot + 1] = array.ctypes.data, port.columns
        self._kept = function, arrays
        self.run = function.program.bound(places, 1)


def function_of(
    network: Network, example: Entries, inputs: Sequence[NestedKey], outputs: Sequence[NestedKey], recorder: Any = None
) -> CompiledFunction:
    """Return a lowered network as a function from the entries ``inputs`` to the entries ``outputs``.

    Args:
        network: a network that draws no random numbers.
        example: entries with any number of rows, for their shapes and dtypes.
        inputs: keys of the arguments; those that aren't read are accepted and ignored.
        outputs: keys of the results.
        recorder: see :class:`Compilation`.

    Raises:
        UnsupportedError: a module has no C++ implementation, draws random numbers or doesn't write an output, or the
            library is missing.
    """
    absent = missing()
    if absent is not None:
        raise UnsupportedError(f"The network can't be compiled: {absent}")
    try:
        written = write_all(network, example, set(outputs), recorder)
        return _function(written, example, inputs, outputs)
    except NotCompiled as why:
        raise UnsupportedError(f"The network can't be one call of the C++ library: {why}.") from why


def _function(
    written: Compilation, example: Entries, inputs: Sequence[NestedKey], outputs: Sequence[NestedKey]
) -> CompiledFunction:
    for key in inputs:
        written.read(key)
    read, made = {port.key: port for port in written.reads}, {port.key: port for port in written.writes}
    if any(port.fill is not None for port in written.writes):
        raise NotCompiled("it draws random numbers")
    absent = [key for key in (*read, *outputs) if key not in (*inputs, *made)]
    if absent:
        raise NotCompiled(f"it reads entries that are no arguments, or doesn't write outputs: {absent}")
    lead = len(example.batch_size)
    ports = {
        port.slot: Port(port.slot, tuple(port.shape[lead:]), port.dtype) for port in (*written.reads, *written.writes)
    }
    used = [*(read[key].slot for key in inputs), *(made[key].slot for key in outputs)]
    unused = [port for slot, port in ports.items() if slot not in used]
    taken = [ports[slot] for slot in used]
    return CompiledFunction(written.finish(), taken[: len(inputs)], taken[len(inputs) :], unused)
