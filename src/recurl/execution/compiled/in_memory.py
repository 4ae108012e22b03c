"""Steps of a program that read and write their entries directly in the memory of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from recurl.core.keys import NestedKey
from recurl.native.memory import has_contiguous_rows
from recurl.native.program import Program
from recurl.sequences.entries import Entries

__all__ = ["StepsInMemory"]


class StepsInMemory:
    """A network as a function of the step index of a batch, whose entries it reads and writes in place.

    Args:
        program: the program that computes a step.
        memory: entries of the batch, ``[T, *B, ...]``.
        places: a pointer and a stride, in elements, for each slot of the program, as for contiguous rows.
        batch_size: ``[*B]``.
        run_modules: computes a step on ``Entries`` where the program can't run.

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
        self._scratch: list[Tensor] = []
        self._noise: list[tuple[Callable[[Tensor], Tensor], Tensor]] = []

    def bind_entry(
        self, slot: int, key: NestedKey, shape: torch.Size, dtype: torch.dtype, keys: list[NestedKey]
    ) -> bool:
        """Bind a slot to an entry of the batch and append its key to ``keys``; return False if that is impossible."""
        entry = self._memory.get(key)
        if entry is None or entry.shape[1:] != shape or entry.dtype is not dtype:
            return False
        keys.append(key)
        self._first[slot], self._per_step[slot] = entry.data_ptr(), entry.stride(0) * entry.element_size()
        if self._lead:
            self._first[slot + 1] = entry.stride(1)
        return has_contiguous_rows(entry, self._lead)

    def bind_scratch(self, slot: int, value: Tensor, fill: Callable[[Tensor], Tensor] | None) -> None:
        """Bind a slot to memory outside the batch, which ``fill`` fills before every step."""
        self._first[slot] = value.data_ptr()
        self._scratch.append(value)
        if fill is not None:
            self._noise.append((fill, value))

    @cached_property
    def _places(self) -> list[bytes]:
        """Packed pointers and strides of each step."""
        length = len(next(iter(self._memory.values())))
        packed = (self._first + np.arange(length)[:, None] * self._per_step).tobytes()
        size = self._first.nbytes
        return [packed[start : start + size] for start in range(0, len(packed), size)]

    def __call__(self, step: int) -> bool:
        """Compute a step and return whether the program could run; if not, its outputs are undefined."""
        for fill, noise in self._noise:
            fill(noise)
        return self._program.run(self._places[step], self._rows)
