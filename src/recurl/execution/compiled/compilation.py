"""Translation of modules to a program of the C++ library, with the entries that it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from recurl.core.errors import UnsupportedError
from recurl.core.keys import NestedKey
from recurl.core.torch_compat import has_hooks, tensors_of
from recurl.execution.compiled.translations import TRANSLATIONS
from recurl.execution.explain import NotCompiled
from recurl.native.program import SOURCES, Program, ProgramBuilder, Value
from recurl.sequences.entries import Entries

__all__ = [
    "Compilation",
    "Density",
    "ExternalTensor",
    "NotCompiled",
    "Signal",
    "unsupported",
    "weight_of",
]

Noise: TypeAlias = Callable[[Tensor], Tensor]
"""Function that fills a tensor with random numbers in place and returns it."""


class Signal(NamedTuple):
    """A tensor ``[*B, *shape]`` inside a program.

    Attributes:
        value: its location.
        shape: shape of one row.
        dtype: its dtype.
        absent: what it would be, if the program doesn't compute it; nothing may read it.
    """

    value: Value
    shape: tuple[int, ...]
    dtype: torch.dtype
    absent: str | None = None

    def part(self, first: int, columns: int) -> Signal:
        """Return ``columns`` of its numbers, starting at ``first``."""
        return Signal(self.value.part(first, columns), (columns,), self.dtype)


class Density(NamedTuple):
    """Parameters of a density of actions that the library can evaluate.

    Attributes:
        location: key of the logits of a categorical distribution, or of the location of a squashed normal.
        scale: key of the scale of a squashed normal; None for a categorical distribution.
        mask: key of the mask of a categorical distribution, or None.
        one_hot: whether categorical actions are one-hot vectors instead of numbers.
        low: lower bound of a squashed normal.
        high: upper bound of a squashed normal.
    """

    location: NestedKey
    scale: NestedKey | None = None
    mask: NestedKey | None = None
    one_hot: bool = False
    low: Any = -1.0
    high: Any = 1.0


class ExternalTensor(NamedTuple):
    """An entry, or a tensor of noise, that a program reads or writes.

    Attributes:
        slot: number of its slot.
        key: key of the entry; None for noise and for outputs that are not wanted.
        shape: shape with the batch dimensions.
        dtype: its dtype.
        fill: function that draws the noise; None for entries.
    """

    slot: int
    key: NestedKey | None
    shape: torch.Size
    dtype: torch.dtype
    fill: Noise | None = None


class Compilation:
    """Builder of a program from modules.

    Args:
        example: entries as in later calls; only shapes, dtypes and devices matter.
        dtype: dtype of the numbers inside the program.
        wanted: keys of the outputs.
        recorder: called with the dtype for an object that replaces the :class:`ProgramBuilder` and records its calls;
            None for the builder itself.
        sequences: whether recurrent modules process sequences, as in recurrent mode, instead of steps.

    Attributes:
        sequences: see above.
        program: the builder, which receives the operations.
        dtype: see above.
        reads: entries that the program reads.
        writes: entries and noise, which are allocated at every call.
    """

    def __init__(
        self,
        example: Entries,
        dtype: torch.dtype,
        wanted: Container[NestedKey | None],
        recorder: Callable[[torch.dtype], Any] | None = None,
        *,
        sequences: bool = False,
    ) -> None:
        self.sequences = sequences
        with unsupported():
            self.program: ProgramBuilder = (recorder or ProgramBuilder)(dtype)
        self.dtype = dtype
        self.reads: list[ExternalTensor] = []
        self.writes: list[ExternalTensor] = []
        self._example = example
        self._wanted = wanted
        self._written: dict[NestedKey, Signal] = {}
        self._read: dict[NestedKey, Signal] = {}
        self._overwritten: list[Value] = []

    def has(self, key: NestedKey) -> bool:
        """Return whether the entry exists."""
        return key in self._written or self._example.get(key, None) is not None

    def read(self, key: NestedKey) -> Signal:
        """Return an entry of any dtype."""
        found = self._written.get(key) or self._read.get(key)
        return found or self._add_input(key)

    def _add_input(self, key: NestedKey) -> Signal:
        tensor, batch = self._example.get(key, None), self._example.batch_size
        if type(tensor) is not Tensor:
            raise NotCompiled(f"the entry {key!r} is {'missing' if tensor is None else type(tensor).__name__}")
        if not tensor.is_cpu or tensor.shape[: len(batch)] != batch:
            raise NotCompiled(f"the entry {key!r} is on {tensor.device}, {list(tensor.shape)}")
        shape = tuple(tensor.shape[len(batch) :])
        value = self.program.outside(math.prod(shape))
        self.reads.append(ExternalTensor(value.slot, key, tensor.shape, tensor.dtype))
        self._read[key] = Signal(value, shape, tensor.dtype)
        return self._read[key]

    def inside(self, columns: int) -> Signal:
        """Return a new vector of ``columns`` numbers inside the program."""
        return Signal(self.program.inside(columns), (columns,), self.dtype)

    def absent(self, shape: tuple[int, ...], what: str) -> Signal:
        """Return a tensor that the program doesn't compute, for an entry that nothing may read."""
        return Signal(Value(-1, 0, math.prod(shape)), shape, self.dtype, what)

    def overwrite(self, signal: Signal) -> None:
        """Record that a module changes ``signal`` in place. The program doesn't, so nothing may read it again.

        Raises:
            NotCompiled: it is an entry.
        """
        entries = [*self._read.values(), *self._written.values()]
        if any(_overlap(signal.value, entry.value) for entry in entries):
            raise NotCompiled("a module changes an entry in place")
        self._overwritten.append(signal.value)

    def _check_kept(self, signal: Signal) -> None:
        if signal.absent is not None:
            raise NotCompiled(f"{signal.absent} isn't computed in C++")
        if any(_overlap(signal.value, value) for value in self._overwritten):
            raise NotCompiled("a tensor is read after a module has changed it in place")

    def converted(self, signal: Signal, divisor: float = 1.0) -> Signal:
        """Convert a tensor of any common dtype to a vector of numbers, divided by ``divisor``."""
        source = torch.uint8 if signal.dtype is torch.bool else signal.dtype
        if source not in SOURCES:
            raise NotCompiled(f"entries of {signal.dtype} aren't converted in C++")
        out = self.inside(signal.value.columns)
        self.program.copy(signal.value, out.value, source, divisor)
        return out

    def joined(self, parts: Sequence[Signal]) -> Signal:
        """Concatenate vectors."""
        out, first = self.inside(sum(part.value.columns for part in parts)), 0
        for part in parts:
            columns = self.numbers(part).value.columns
            self.program.copy(part.value, out.value.part(first, columns), self.dtype)
            first += columns
        return out

    def output(self, key: NestedKey | None, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Signal:
        """Return a new tensor that is the entry ``key`` itself; without a key it is discarded."""
        return self._add_output(key if key in self._wanted else None, shape, dtype or self.dtype, key, None)

    def noise(self, like: Signal, fill: Noise) -> Signal:
        """Return random numbers, drawn before the program runs in every call."""
        return self._add_output(None, like.shape, like.dtype, None, fill)

    def _add_output(
        self, kept: NestedKey | None, shape: tuple[int, ...], dtype: torch.dtype, key: Any, fill: Noise | None
    ) -> Signal:
        value = self.program.outside(math.prod(shape))
        whole = torch.Size([*self._example.batch_size, *shape])
        if kept is not None:  # this write shadows earlier outputs under the key
            self.writes = [write._replace(key=None) if write.key == kept else write for write in self.writes]
        self.writes.append(ExternalTensor(value.slot, kept, whole, dtype, fill))
        signal = Signal(value, shape, dtype)
        if key is not None:
            self._written[key] = signal
        return signal

    def write(self, key: NestedKey, signal: Signal) -> None:
        """Set an entry."""
        if signal.absent is None or key in self._wanted:
            self._check_kept(signal)
        if key in self._wanted:
            self.program.copy(signal.value, self.output(key, signal.shape).value, self.dtype)
        self._written[key] = signal

    @contextmanager
    def scope(self) -> Generator[None]:
        """Open a scope whose entries are not visible after it."""
        written = dict(self._written)
        yield
        self._written = written

    def numbers(self, signal: Signal, columns: int | None = None) -> Signal:
        """Return ``signal`` if it is a vector of numbers in the program's dtype, else raise."""
        self._check_kept(signal)
        if signal.dtype is not self.dtype:
            raise NotCompiled(f"a network reads {signal.dtype} where its weights are {self.dtype}")
        if len(signal.shape) != 1 or (columns is not None and signal.shape != (columns,)):
            raise NotCompiled(f"a layer reads {list(signal.shape)}, not a vector of its size")
        return signal

    def apply(self, module: object, *inputs: Signal) -> tuple[Signal, ...]:
        """Add the computation of ``module`` on ``inputs`` to the program."""
        name = type(module).__name__
        if not isinstance(module, nn.Module) or has_hooks(module) or "forward" in vars(module):
            raise NotCompiled(f"{name} is not a plain module: it is a function, or has hooks or its own forward")
        translate = None if isinstance(module, TensorDictModuleBase) else TRANSLATIONS.find(module)
        if translate is None:
            raise NotCompiled(f"{name} has no C++ implementation")
        with unsupported():
            found: Any = translate(self, module, *inputs)
        return found if type(found) is tuple else (found,)

    def add(self, module: TensorDictModuleBase) -> None:
        """Add the step of a TensorDict module, or in recurrent mode its sequences, to the program."""
        translate = TRANSLATIONS.find(module)
        if translate is None:
            raise NotCompiled(f"{type(module).__name__} has no C++ implementation")
        with unsupported():
            translate(self, module)

    def finish(self) -> Program:
        """Return the finished program."""
        return self.program.finish()


def _overlap(one: Value, other: Value) -> bool:
    first, last = max(one.column, other.column), min(one.column + one.columns, other.column + other.columns)
    return one.slot == other.slot and first < last


@contextmanager
def unsupported() -> Generator[None]:
    """Convert an :class:`UnsupportedError` of the library to :class:`NotCompiled`."""
    try:
        yield
    except UnsupportedError as error:
        raise NotCompiled(str(error)) from error


def weight_of(module: nn.Module, name: str) -> Tensor | None:
    """Return a tensor that ``module`` holds; programs read it in place."""
    computed = isinstance(getattr(type(module), name, None), property)
    for held in () if computed else (*tensors_of(module), vars(module)):
        if name in held:
            return held[name]
    raise NotCompiled(f"the {name} of {type(module).__name__} is computed from other tensors, is not a parameter")
