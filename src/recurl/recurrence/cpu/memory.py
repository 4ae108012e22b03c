"""Memory that is written step by step, several tensors in one call of the library."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from torch import Tensor

from recurl._torch import foreach_copy_
from recurl.recurrence.cpu.library import Memory, write_function
from recurl.recurrence.cpu.step import can_step

__all__ = ["StepMemory"]


class StepMemory:
    """Tensors that are written one step after another.

    Plain tensors on the CPU are copied by the library, in a tenth of the time of torch's copies where rows are small;
    all others, and those that need a conversion, by torch.

    Args:
        tensors: ``[T, *B, ...]`` each.
        lead: number of dimensions in ``*B``.

    Example:
        >>> import torch
        >>> states = torch.zeros(2, 3, 4).movedim(1, 0)
        >>> with torch.no_grad():
        ...     StepMemory([states], 1).write(1, [0], [torch.ones(2, 4)])
        >>> states.sum((1, 2))
        tensor([0., 8., 0.])
    """

    def __init__(self, tensors: Sequence[Tensor], lead: int) -> None:
        self._tensors = tensors
        self._slots: dict[int, tuple[Tensor, ...]] = {}
        fast = can_step()
        self._dtypes = [tensor.dtype if fast and _rows_are_whole(tensor, lead) else None for tensor in tensors]
        self._table = (Memory * len(tensors))(*(_memory_of(tensor, lead) for tensor in tensors))
        self._address = ctypes.addressof(self._table)
        self._write = write_function() if fast else None

    def write(self, step: int, numbers: Sequence[int], values: Sequence[Tensor]) -> None:
        """Copy the values of a step, ``[*B, ...]`` each.

        Args:
            step: its index.
            numbers: of the tensors that are written.
            values: what is written, in the shapes of the tensors.
        """
        pairs, others = list[int](), list[tuple[int, Tensor]]()
        dtypes = self._dtypes
        for number, value in zip(numbers, values, strict=True):
            if value.dtype is dtypes[number] and value.is_contiguous() and value.is_cpu:
                pairs += number, value.data_ptr()
            else:
                others.append((number, value))
        if self._write is not None and pairs:
            self._write(self._address, step, struct.pack(f"{len(pairs)}q", *pairs), len(pairs) // 2)
        if others:
            foreach_copy_([self._slot(number, step) for number, _ in others], [value for _, value in others])

    def _slot(self, number: int, step: int) -> Tensor:
        if number not in self._slots:
            self._slots[number] = self._tensors[number].unbind()
        return self._slots[number][step]


def _rows_are_whole(tensor: Tensor, lead: int) -> bool:
    """Return whether the rows of a step lie at equal distances, each in one piece."""
    plain = type(tensor) is Tensor and tensor.is_cpu and not tensor.is_complex()
    return plain and lead <= 1 and tensor.numel() > 0 and tensor[(0,) * (1 + lead)].is_contiguous()


def _memory_of(tensor: Tensor, lead: int) -> Memory:
    if not _rows_are_whole(tensor, lead):
        return Memory()
    size = tensor.element_size()
    return Memory(
        data=tensor.data_ptr(),
        rows=tensor.shape[1] if lead else 1,
        bytes=tensor.shape[1 + lead :].numel() * size,
        row_stride=tensor.stride(1) * size if lead else 0,
        step_stride=tensor.stride(0) * size,
    )
