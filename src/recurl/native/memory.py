"""Step-by-step writes to several tensors in a single library call."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

from recurl.core.torch_compat import foreach_copy_
from recurl.native.library import can_call, write_function
from recurl.native.structures import Memory

__all__ = ["StepMemory", "has_contiguous_rows"]

_shape, _dtype, _is_cpu = attrgetter("shape"), attrgetter("dtype"), attrgetter("is_cpu")
_address, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous


class StepMemory:
    """Writer of tensors that are filled one step at a time.

    The library copies plain CPU tensors, for small rows in a tenth of the time that torch needs. All other tensors, and
    those that need a conversion, are copied by torch.

    Args:
        tensors: destination tensors, ``[T, *B, ...]`` each.
        lead: number of dimensions in ``*B``.
        repeated: indices of source tensors. The last ``len(repeated)`` tensors usually receive the values that the
            tensors with these indices received in the previous step, in the same order.

    Example:
        >>> import torch
        >>> states = torch.zeros(2, 3, 4).movedim(1, 0)
        >>> with torch.no_grad():
        ...     StepMemory([states], 1).write(1, [torch.ones(2, 4)])
        True
        >>> states.sum((1, 2))
        tensor([0., 8., 0.])
    """

    def __init__(self, tensors: Sequence[Tensor], lead: int, repeated: Sequence[int] = ()) -> None:
        self._tensors = tensors
        self._slots: dict[int, tuple[Tensor, ...]] = {}
        fast = can_call()
        self._shapes = [tensor.shape[1:] for tensor in tensors]
        whole = [fast and has_contiguous_rows(tensor, lead) for tensor in tensors]
        self._dtypes = [tensor.dtype if plain else None for tensor, plain in zip(tensors, whole, strict=True)]
        memory = (_memory_of(t, lead) if plain else Memory() for t, plain in zip(tensors, whole, strict=True))
        self._table = (Memory * len(tensors))(*memory)
        self._address = ctypes.addressof(self._table)
        self._write = write_function() if fast else None
        self._count = len(tensors) - len(repeated)  # number of tensors that don't repeat others
        self._repeated = repeated
        self._known: tuple[list[Any], list[int]] = [], []  # values expected to repeat, and their addresses
        self._pairs = [number for place in range(len(tensors)) for number in (place, 0)]
        self._packed = struct.Struct(f"{len(self._pairs)}q")

    def write(self, step: int, values: Sequence[Any]) -> bool:
        """Write the values of a step, ``[*B, ...]`` each.

        Args:
            step: index of the step.
            values: one value per tensor; values that aren't tensors are rejected.

        Returns:
            Whether all values match the shapes of their tensors; otherwise nothing is written.
        """
        count = self._count
        new, old = values[:count], values[count:]
        first = _addresses(new, self._shapes[:count], self._dtypes[:count])
        last = first and self._repeated_addresses(old)
        if self._write is None or not first or last is None:
            return self._write_mixed(step, values)
        pairs = self._pairs
        pairs[1::2] = first + last
        self._write(self._address, step, self._packed.pack(*pairs), len(values))
        self._known = [new[number] for number in self._repeated], [first[number] for number in self._repeated]
        return True

    def _repeated_addresses(self, values: Sequence[Any]) -> list[int] | None:
        known, addresses = self._known
        if len(known) == len(values) and all(map(is_, values, known)) and list(map(_address, values)) == addresses:
            return addresses
        count = self._count
        return _addresses(values, self._shapes[count:], self._dtypes[count:])

    def _write_mixed(self, step: int, values: Sequence[Any]) -> bool:
        """Write values that may have other dtypes, strides or devices."""
        self._known = [], []
        for value, shape in zip(values, self._shapes, strict=True):
            if not isinstance(value, Tensor) or value.shape != shape:
                return False
        pairs, others = list[int](), list[int]()
        for number, (value, dtype) in enumerate(zip(values, self._dtypes, strict=True)):
            if value.dtype is dtype and value.is_contiguous() and value.is_cpu:
                pairs += number, value.data_ptr()
            else:
                others.append(number)
        if self._write is not None and pairs:
            self._write(self._address, step, struct.pack(f"{len(pairs)}q", *pairs), len(pairs) // 2)
        if others:
            foreach_copy_([self._slot(number, step) for number in others], [values[number] for number in others])
        return True

    def _slot(self, number: int, step: int) -> Tensor:
        if number not in self._slots:
            self._slots[number] = self._tensors[number].unbind()
        return self._slots[number][step]


def _addresses(values: Sequence[Any], shapes: list[Any], dtypes: list[Any]) -> list[int] | None:
    """Return the addresses of tensors, or None if one isn't a contiguous CPU tensor of its shape and dtype."""
    if any(type(value) is not Tensor for value in values):
        return None
    if list(map(_shape, values)) != shapes or list(map(_dtype, values)) != dtypes:
        return None
    if not (all(map(_is_contiguous, values)) and all(map(_is_cpu, values))):
        return None
    return list(map(_address, values))


def has_contiguous_rows(tensor: Tensor, lead: int) -> bool:
    """Return whether each row of a step is contiguous and rows have a constant stride."""
    plain = type(tensor) is Tensor and tensor.is_cpu and not tensor.is_complex()
    return plain and lead <= 1 and tensor.numel() > 0 and _in_order(tensor.shape, tensor.stride(), 1 + lead)


def _in_order(shape: Sequence[int], strides: Sequence[int], first: int) -> bool:
    """Return whether the dimensions from ``first`` on are contiguous."""
    size = 1
    for length, stride in zip(reversed(shape[first:]), reversed(strides[first:]), strict=True):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def _memory_of(tensor: Tensor, lead: int) -> Memory:
    shape, strides, size = tensor.shape, tensor.stride(), tensor.element_size()
    rows, row_stride = (shape[1], strides[1] * size) if lead else (1, 0)
    return Memory(tensor.data_ptr(), rows, math.prod(shape[1 + lead :]) * size, row_stride, strides[0] * size)
