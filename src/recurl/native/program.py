"""Programs of the library: one step of a complete network in a single call.

A program holds operations and the addresses of the weights. It reads the weights at every run, so an in-place edit
takes effect immediately. Several threads can run the same program at the same time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recurl.core.errors import UnsupportedError
from recurl.native import structures
from recurl.native.layers import Layers, StepCell, sizes_of, weights_of
from recurl.native.library import DTYPES, PLAIN_TYPES, check, instruction_sets, run_function

__all__ = ["ACTIVATIONS", "SOURCES", "Program", "ProgramBuilder", "Value"]

_KINDS = ("copy", "one_hot", "linear", "activate", "normalize", "layer_norm", "recur", "positive", "choose", "squash")
ACTIVATIONS = ("tanh", "sigmoid", "silu", "elu", "leaky", "clamp")
SOURCES = (torch.float32, torch.float64, torch.uint8, torch.int16, torch.int32, torch.int64)
"""Source dtypes that can be converted, in the order of ``enum recurl_source``."""
_NO_CHOICE, _NAN = 4, 3
_ONE_HOT, _REFUSES, _VALUE = 1, 2, 4
_DIFFERENTIABLE = ("copy", "one_hot", "linear", "activate", "normalize", "layer_norm", "recur", "positive")


class Value(NamedTuple):
    """Range of columns of a slot; a slot holds one row of numbers per batch row.

    Attributes:
        slot: index of the slot.
        column: first column.
        columns: number of columns.
    """

    slot: int
    column: int
    columns: int

    def part(self, first: int, columns: int) -> Value:
        """Return a subrange of ``columns`` columns, starting at ``first``."""
        return Value(self.slot, self.column + first, columns)


class Program:
    """Sequence of operations that run as one call, built by a :class:`ProgramBuilder`.

    Attributes:
        given: number of external slots.
        address: address of its recurl_program.
    """

    def __init__(self, structure: structures.Program, given: int, kept: list[object]) -> None:
        self._structure = structure
        self.given = given
        self.address = ctypes.addressof(structure)
        self._kept = kept
        self._places = structures.Place.packer(given)
        self._run = run_function()

    def __call__(self, places: Sequence[int], rows: int) -> bool:
        """Run ``rows`` rows, given a pointer and a stride for each external slot.

        Returns:
            Whether all actions could be chosen: False if a distribution that checks its inputs has NaN probabilities
            or no allowed choice.
        """
        return self.run(self._places.pack(*places), rows)

    def run(self, places: bytes, rows: int) -> bool:
        """Run ``rows`` rows, given the places as packed int64 bytes."""
        status = self._run(self.address, places, rows, torch.get_num_threads())
        return status == 0 or _succeeded(status)

    def bound(self, places: Sequence[int], rows: int) -> Callable[[], bool]:
        """Return a function that runs the program on these places, on one thread."""
        run, pointer, packed = self._run, self.address, self._places.pack(*places)

        def call() -> bool:
            status = run(pointer, packed, rows, 1)
            return status == 0 or _succeeded(status)

        return call


def _succeeded(status: int) -> bool:
    if status in (_NAN, _NO_CHOICE):
        return False
    check(status)
    return True


class ProgramBuilder:
    """Builder of a program from a sequence of operations.

    Args:
        dtype: float32 or float64, the dtype of all internal numbers and of the weights.

    Attributes:
        weights: the weights that the operations read, as passed in.

    Raises:
        UnsupportedError: the library doesn't support an argument; the message states which.

    Example:
        >>> builder = ProgramBuilder(torch.float32)
        >>> x, y = builder.outside(3), builder.outside(2)
        >>> weight = torch.ones(2, 3)
        >>> builder.linear(x, weight, None, y)
        >>> given, result = torch.ones(5, 3), torch.empty(5, 2)
        >>> builder.finish()([given.data_ptr(), 3, result.data_ptr(), 2], 5)
        True
        >>> result[0]
        tensor([3., 3.])
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise UnsupportedError(f"the C++ library computes in float32 and float64, not in {dtype}")
        self.dtype = dtype
        self._ops: list[structures.Op] = []
        self._columns: list[int] = []
        self._given = 0
        self._kept: list[object] = []
        self.weights: list[Tensor] = []

    # Internal slots are numbered from -2 downwards until finish(), which knows the number of external ones. -1 is none.

    def outside(self, columns: int) -> Value:
        """Add an external slot, whose place is passed with each call."""
        self._given += 1
        return Value(self._given - 1, 0, columns)

    def inside(self, columns: int) -> Value:
        """Add an internal slot in memory of the library."""
        self._columns.append(columns)
        return Value(-1 - len(self._columns), 0, columns)

    def copy(self, value: Value, to: Value, source: torch.dtype, divisor: float = 1.0) -> None:
        """Convert numbers from the dtype ``source`` and divide them by ``divisor``."""
        self._add("copy", value, to, variant=SOURCES.index(source), low=divisor)

    def one_hot(self, value: Value, to: Value) -> None:
        """Write the one-hot encoding of an int64."""
        self._add("one_hot", value, to)

    def linear(self, value: Value, weight: Tensor, bias: Tensor | None, to: Value) -> None:
        """Write ``value weight^T + bias``."""
        pointers = self._weights(((weight, (to.columns, value.columns)), (bias, (to.columns,))))
        self._add("linear", value, to, w=pointers[0], b=pointers[1])

    def activate(self, name: str, value: Value, to: Value, low: float = 0.0, high: float = torch.inf) -> None:
        """Apply one of :data:`ACTIVATIONS`."""
        self._add("activate", value, to, variant=ACTIVATIONS.index(name), low=low, high=high)

    def normalize(self, value: Value, mean: Tensor, scale: Tensor, clip: float, to: Value) -> None:
        """Write ``(value - mean) * scale``, clipped to ``[-clip, clip]``."""
        shape = (value.columns,)
        w, b = self._weights(((mean, shape), (scale, shape)))
        self._add("normalize", value, to, w=w, b=b, low=-clip, high=clip)

    def layer_norm(
        self, value: Value, weight: Tensor | None, bias: Tensor | None, eps: float, to: Value, *, centered: bool = True
    ) -> None:
        """Normalize over the columns by the variance, or by the mean square if not ``centered``."""
        shape = (value.columns,)
        w, b = self._weights(((weight, shape), (bias, shape)))
        self._add("layer_norm", value, to, w=w, b=b, low=eps, variant=int(not centered))

    def recur(
        self,
        cell: StepCell,
        layers: Layers,
        value: Value,
        is_init: Value | None,
        before: Sequence[Value],
        after: Sequence[Value],
        to: Value,
    ) -> None:
        """Write the features and the states after one step; states that aren't given are zero."""
        packed = weights_of(cell, layers, self.dtype, value.columns)
        if packed is None:
            raise UnsupportedError(f"the C++ library has no step for this {cell.name}")
        sizes = sizes_of(cell, layers, self.dtype, value.columns)
        step, weights = (ctypes.create_string_buffer(part) for part in (sizes, packed))
        tensors = [w for (layer,) in layers for w in layer if w is not None]
        self.weights += tensors
        self._kept += [step, weights, *tensors, *(tensor.detach() for tensor in tensors)]
        slots = (is_init, *_pad_to_two(before), *_pad_to_two(after))
        addresses = {"step": ctypes.addressof(step), "layers": ctypes.addressof(weights)}
        self._add("recur", value, to, slots=slots, **addresses)

    def positive(self, value: Value, bias: float, least: float, lower_bound: float, to: Value) -> None:
        """Write ``softplus(value + bias) + least``, at least ``lower_bound``."""
        (w,) = self._weights(((torch.tensor([bias], dtype=self.dtype), (1,)),))
        self._add("positive", value, to, w=w, low=least, high=lower_bound)

    def choose(
        self,
        logits: Value,
        noise: Value | None,
        mask: Value | None,
        to: Value,
        log_prob: Value | None,
        *,
        one_hot: bool,
        refuses: bool = False,
        value: bool = False,
    ) -> None:
        """Choose an action from logits, as int64: a sample given ``noise``, else the mode; see ``Categorical``.

        With ``value``, the logit of the choice is written instead of its log-probability.
        """
        variant = _ONE_HOT * one_hot + _REFUSES * refuses + _VALUE * value
        self._add("choose", logits, to, slots=(noise, mask, log_prob), variant=variant)

    def squash(
        self,
        loc: Value,
        scale: Value,
        noise: Value | None,
        bounds: tuple[Tensor, Tensor],
        to: Value,
        log_prob: Value | None,
    ) -> None:
        """Write a sample of ``TanhNormal``, or its median without ``noise``; ``bounds`` are low and half the range."""
        w, b = self._weights([(bound, (loc.columns,)) for bound in bounds])
        self._add("squash", loc, to, slots=(scale, noise, log_prob), w=w, b=b)

    @property
    def gradient_obstacle(self) -> str | None:
        """Reason why the program has no derivatives, or None if it has."""
        ops = [_KINDS[op.kind] for op in self._ops]
        missing = next((kind for kind in ops if kind not in _DIFFERENTIABLE), None)
        after = {slot for op, kind in zip(self._ops, ops, strict=True) if kind == "recur" for slot in op.slots[3:]} - {
            -1
        }
        if missing is not None:
            return f"the operation {missing} has no derivative in C++"
        return "an operation reads a state after a step" if any(op.source in after for op in self._ops) else None

    def finish(self) -> Program:
        """Build the program."""
        ops, columns = (
            (structures.Op * len(self._ops))(*self._ops),
            (ctypes.c_int64 * len(self._columns))(*self._columns),
        )
        for op in ops:
            op.source, op.to = self._number(op.source), self._number(op.to)
            for place, slot in enumerate(op.slots):
                op.slots[place] = self._number(slot)
        structure = structures.Program(
            dtype=DTYPES[self.dtype],
            isa=len(instruction_sets()) - 1,
            given=self._given,
            inner=len(columns),
            columns=ctypes.addressof(columns),
            count=len(ops),
            ops=ctypes.addressof(ops),
        )
        return Program(structure, self._given, [*self._kept, ops, columns])

    def _number(self, slot: int) -> int:
        return slot if slot >= -1 else self._given - 2 - slot

    def _add(
        self,
        kind: str,
        value: Value,
        to: Value,
        *,
        slots: Sequence[Value | None] = (),
        **fields: float | None,
    ) -> None:
        op = structures.Op(kind=_KINDS.index(kind), source=value.slot, from_column=value.column, inputs=value.columns)
        op.to, op.to_column, op.outputs = to.slot, to.column, to.columns
        for name, field in fields.items():
            setattr(op, name, field)
        for place in range(5):
            slot = slots[place] if place < len(slots) else None
            op.slots[place] = -1 if slot is None else slot.slot
        self._ops.append(op)

    def _weights(self, expected: Sequence[tuple[Tensor | None, tuple[int, ...]]]) -> list[int | None]:
        """Return the addresses of weights, and keep their memory alive."""
        pointers: list[int | None] = []
        for tensor, shape in expected:
            if tensor is None:
                pointers.append(None)
                continue
            if type(tensor) not in PLAIN_TYPES or not tensor.is_cpu or tensor.dtype is not self.dtype:
                raise UnsupportedError(f"a weight is {type(tensor).__name__} of {tensor.dtype} on {tensor.device}")
            if tensor.shape != shape or not tensor.is_contiguous():
                raise UnsupportedError(f"a weight has the shape {list(tensor.shape)} or isn't contiguous")
            self.weights.append(tensor)
            alias = tensor.detach()  # keeps the memory even if `tensor.data` is assigned
            self._kept.append(alias)
            pointers.append(alias.data_ptr())
        return pointers


def _pad_to_two(values: Sequence[Value]) -> tuple[Value | None, Value | None]:
    padded: tuple[Value | None, ...] = (*values, None, None)
    return padded[0], padded[1]
