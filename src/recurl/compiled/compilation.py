"""What modules write their step into: a program of the C++ library, and which entries it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from recurl._torch import has_hooks
from recurl.errors import UnsupportedError
from recurl.keys import NestedKey
from recurl.lowering import Entries
from recurl.recurrence.cpu.program import SOURCES, Program, ProgramBuilder, Value

__all__ = [
    "Compilable",
    "CompilableNetwork",
    "Compilation",
    "Density",
    "NotCompiled",
    "Outside",
    "Signal",
    "defines_both",
]

Noise: TypeAlias = Callable[[Tensor], Tensor]
"""Fills a tensor with random numbers in place, and returns it."""


class NotCompiled(Exception):
    """A module can't be part of a program; the message says why."""


class Signal(NamedTuple):
    """A tensor ``[*B, *shape]`` inside a program.

    Attributes:
        value: where it is.
        shape: of one row.
        dtype: its dtype.
    """

    value: Value
    shape: tuple[int, ...]
    dtype: torch.dtype

    def part(self, first: int, columns: int) -> Signal:
        """Return ``columns`` of its numbers from ``first`` on."""
        return Signal(self.value.part(first, columns), (columns,), self.dtype)


class Density(NamedTuple):
    """How likely actions are, as the library knows it.

    Attributes:
        location: key of the logits of a choice, or of the location of a squashed normal.
        scale: key of its scale; None for a choice.
        mask: key of a mask of choices, or None.
        one_hot: choices are one-hot vectors, not numbers.
        low: lower bound of a squashed normal.
        high: its upper bound.
    """

    location: NestedKey
    scale: NestedKey | None = None
    mask: NestedKey | None = None
    one_hot: bool = False
    low: Any = -1.0
    high: Any = 1.0


class Compilable(Protocol):
    """A TensorDict module that writes its step into a program."""

    def compile_entries(self, program: Compilation) -> None:
        """Write what ``forward`` computes in a step, from :meth:`Compilation.read` to :meth:`Compilation.write`.

        Raises:
            NotCompiled: it can't be part of a program.
        """
        ...


class CompilableNetwork(Protocol):
    """A module on tensors that writes its computation into a program."""

    def compile_tensors(self, program: Compilation, *inputs: Signal) -> Signal | tuple[Signal, ...]:
        """Write what ``forward`` computes of ``inputs``.

        Raises:
            NotCompiled: it can't be part of a program.
        """
        ...


class Outside(NamedTuple):
    """An entry, or noise, that a program reads or writes.

    Attributes:
        slot: number of its slot.
        key: of the entry; None for noise and for what nobody asked for.
        shape: with the batch dimensions.
        dtype: its dtype.
        fill: draws the noise; None for entries.
    """

    slot: int
    key: NestedKey | None
    shape: torch.Size
    dtype: torch.dtype
    fill: Noise | None = None


class Compilation:
    """A program being written.

    Args:
        example: entries as they will be when it runs; only shapes, dtypes and devices count.
        dtype: of the numbers inside.
        wanted: keys that are to be written.
        layers: what writes a module of torch.nn into it, by class.
        recorder: stands for the program's builder of this dtype, whose calls it keeps; None for the builder itself.
        sequences: memories read sequences, as in recurrent mode, not steps.

    Attributes:
        sequences: see above.
        program: receives the operations.
        dtype: see above.
        reads: entries that are read.
        writes: entries and noise for which a call makes tensors.
    """

    def __init__(
        self,
        example: Entries,
        dtype: torch.dtype,
        wanted: Container[NestedKey | None],
        layers: Mapping[type, Callable[..., Any]],
        recorder: Callable[[torch.dtype], Any] | None = None,
        *,
        sequences: bool = False,
    ) -> None:
        self.sequences = sequences
        with unsupported():
            self.program: ProgramBuilder = (recorder or ProgramBuilder)(dtype)
        self.dtype = dtype
        self.reads: list[Outside] = []
        self.writes: list[Outside] = []
        self._example = example
        self._wanted = wanted
        self._layers = layers
        self._written: dict[NestedKey, Signal] = {}
        self._read: dict[NestedKey, Signal] = {}

    def has(self, key: NestedKey) -> bool:
        """Return whether there is such an entry."""
        return key in self._written or self._example.get(key, None) is not None

    def read(self, key: NestedKey) -> Signal:
        """Return an entry, of any dtype."""
        found = self._written.get(key) or self._read.get(key)
        return found or self._enter(key)

    def _enter(self, key: NestedKey) -> Signal:
        tensor, batch = self._example.get(key, None), self._example.batch_size
        if type(tensor) is not Tensor:
            raise NotCompiled(f"the entry {key!r} is {'missing' if tensor is None else type(tensor).__name__}")
        if not tensor.is_cpu or tensor.shape[: len(batch)] != batch:
            raise NotCompiled(f"the entry {key!r} is on {tensor.device}, {list(tensor.shape)}")
        shape = tuple(tensor.shape[len(batch) :])
        value = self.program.outside(math.prod(shape))
        self.reads.append(Outside(value.slot, key, tensor.shape, tensor.dtype))
        self._read[key] = Signal(value, shape, tensor.dtype)
        return self._read[key]

    def inside(self, columns: int) -> Signal:
        """Return a place for ``columns`` numbers."""
        return Signal(self.program.inside(columns), (columns,), self.dtype)

    def converted(self, signal: Signal, divisor: float = 1.0) -> Signal:
        """Return a tensor of any common dtype as a vector of numbers, divided by ``divisor``."""
        source = torch.uint8 if signal.dtype is torch.bool else signal.dtype
        if source not in SOURCES:
            raise NotCompiled(f"entries of {signal.dtype} aren't converted in C++")
        out = self.inside(signal.value.columns)
        self.program.copy(signal.value, out.value, source, divisor)
        return out

    def joined(self, parts: Sequence[Signal]) -> Signal:
        """Return vectors in one."""
        out, first = self.inside(sum(part.value.columns for part in parts)), 0
        for part in parts:
            columns = self.numbers(part).value.columns
            self.program.copy(part.value, out.value.part(first, columns), self.dtype)
            first += columns
        return out

    def output(self, key: NestedKey | None, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Signal:
        """Return a place that is itself the entry ``key``; without a key it is left aside."""
        return self._leave(key if key in self._wanted else None, shape, dtype or self.dtype, key, None)

    def noise(self, like: Signal, fill: Noise) -> Signal:
        """Return random numbers, drawn in every call before the program runs."""
        return self._leave(None, like.shape, like.dtype, None, fill)

    def _leave(
        self, kept: NestedKey | None, shape: tuple[int, ...], dtype: torch.dtype, key: Any, fill: Noise | None
    ) -> Signal:
        value = self.program.outside(math.prod(shape))
        whole = torch.Size([*self._example.batch_size, *shape])
        if kept is not None:  # of what was written under this key before, nobody hears
            self.writes = [write._replace(key=None) if write.key == kept else write for write in self.writes]
        self.writes.append(Outside(value.slot, kept, whole, dtype, fill))
        signal = Signal(value, shape, dtype)
        if key is not None:
            self._written[key] = signal
        return signal

    def write(self, key: NestedKey, signal: Signal) -> None:
        """Set an entry."""
        if key in self._wanted:
            self.program.copy(signal.value, self.output(key, signal.shape).value, self.dtype)
        self._written[key] = signal

    @contextmanager
    def aside(self) -> Generator[None]:
        """Return a block whose entries aren't seen after it."""
        written = dict(self._written)
        yield
        self._written = written

    def numbers(self, signal: Signal, columns: int | None = None) -> Signal:
        """Return ``signal``, if it is a vector of numbers in the program's dtype."""
        if signal.dtype is not self.dtype:
            raise NotCompiled(f"a network reads {signal.dtype} where its weights are {self.dtype}")
        if len(signal.shape) != 1 or (columns is not None and signal.shape != (columns,)):
            raise NotCompiled(f"a layer reads {list(signal.shape)}, no vector of its size")
        return signal

    def apply(self, module: object, *inputs: Signal) -> tuple[Signal, ...]:
        """Write what ``module`` computes of ``inputs``."""
        if not isinstance(module, nn.Module) or has_hooks(module) or "forward" in vars(module):
            raise NotCompiled(f"{type(module).__name__} is no module of its class alone: a function, or one with hooks")
        write = self._layers.get(type(module))
        if write is None and not defines_both(type(module), "compile_tensors"):
            raise NotCompiled(f"{type(module).__name__} has no form in C++")
        with unsupported():
            found: Any = write(self, module, *inputs) if write else module.compile_tensors(self, *inputs)  # pyright: ignore[reportCallIssue, reportUnknownVariableType] - a method by that name
        return found if type(found) is tuple else (found,)

    def finish(self) -> Program:
        """Return the program."""
        return self.program.finish()


@contextmanager
def unsupported() -> Generator[None]:
    """Raise what the library refuses as :class:`NotCompiled`."""
    try:
        yield
    except UnsupportedError as error:
        raise NotCompiled(str(error)) from error


@cache
def defines_both(cls: type, method: str, forward: str = "forward") -> bool:
    """Return whether the class that defines ``forward`` also defines ``method``: an override of one loses it."""
    owners = [next((owner for owner in cls.__mro__ if name in vars(owner)), None) for name in (method, forward)]
    return owners[0] is not None and owners[0] is owners[1]
