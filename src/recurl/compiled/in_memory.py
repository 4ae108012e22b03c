"""Steps of a program that are read and written where they lie in a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from recurl.keys import NestedKey
from recurl.lowering import Entries
from recurl.recurrence.cpu.memory import rows_are_whole
from recurl.recurrence.cpu.program import Program

__all__ = ["StepsInMemory"]


class StepsInMemory:
    """A network as a function of the step of a batch, which it reads and writes in place.

    Args:
        program: computes it.
        memory: entries of the batch, ``[T, *B, ...]``.
        places: a pointer and a stride, in elements, for each slot of the program, as for rows in one piece.
        batch_size: ``[*B]``.
        run_modules: computes a step on ``Entries`` otherwise.

    Attributes:
        reads: keys of the entries that are read.
        writes: keys of the entries that are written.
        run_modules: see above.
    """

    def __init__(
        self,
        program: Program,
        memory: Mapping[NestedKey, Tensor],
        places: Sequence[int],
        batch_size: torch.Size,
        run_modules: Callable[[Entries], None],
    ) -> None:
        self.reads: list[NestedKey] = []
        self.writes: list[NestedKey] = []
        self.run_modules = run_modules
        self._program, self._memory = program, memory
        self._lead, self._rows = len(batch_size), batch_size.numel()
        self._first = np.array(places, dtype=np.int64)
        self._per_step = np.zeros_like(self._first)
        self._aside: list[Tensor] = []
        self._noise: list[tuple[Callable[[Tensor], Tensor], Tensor]] = []

    def put(self, slot: int, key: NestedKey, shape: torch.Size, dtype: torch.dtype, noted: list[NestedKey]) -> bool:
        """Let a slot be the entry of a step, add its key to those ``noted``, and return whether that can be."""
        entry = self._memory.get(key)
        if entry is None or entry.shape[1:] != shape or entry.dtype is not dtype:
            return False
        noted.append(key)
        self._first[slot], self._per_step[slot] = entry.data_ptr(), entry.stride(0) * entry.element_size()
        if self._lead:
            self._first[slot + 1] = entry.stride(1)
        return rows_are_whole(entry, self._lead)

    def leave(self, slot: int, value: Tensor, fill: Callable[[Tensor], Tensor] | None) -> None:
        """Let a slot be memory aside of the batch, which ``fill`` fills before every step."""
        self._first[slot] = value.data_ptr()
        self._aside.append(value)
        if fill is not None:
            self._noise.append((fill, value))

    @cached_property
    def _places(self) -> list[bytes]:
        """The places of each step."""
        length = len(next(iter(self._memory.values())))
        packed = (self._first + np.arange(length)[:, None] * self._per_step).tobytes()
        size = self._first.nbytes
        return [packed[start : start + size] for start in range(0, len(packed), size)]

    def __call__(self, step: int) -> bool:
        """Compute a step and return whether that could be; what it writes means nothing if not."""
        for fill, noise in self._noise:
            fill(noise)
        return self._program.run(self._places[step], self._rows)
