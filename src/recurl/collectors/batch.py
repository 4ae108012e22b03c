"""Preallocated memory for one batch, filled step by step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NoReturn, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl._torch import edits_of
from recurl.collectors.start_states import SparseStates
from recurl.errors import ArgumentError, UsageError
from recurl.keys import DONE, NEXT, TRUNCATED
from recurl.lowering import Step, leaves, leaves_by_path
from recurl.recurrence.cpu.memory import StepMemory

_Key = tuple[str, ...]


class BatchWriter:
    """Writes rows of a batch ``[*B, T]``, allocated at the first step with its keys, shapes and dtypes.

    Unless a row was reset, most root entries of a step are the same tensors as those of the previous step's ``next``.
    They are not copied at every step but at the end, in one piece from reset to reset.

    Args:
        batch: the batch, ``[*B, T]``, empty at first. Its memory is on its device; on that of the first step's tensors
            where it has none.
        rows: index of the rows to write, where other writers write the others; ``...`` for all.
        batch_size: their shape, ``[*B]``.
        states: takes recurrent states that are kept at the starts of sequences only; all are kept when None.
    """

    def __init__(
        self, batch: TensorDict, rows: Any, batch_size: torch.Size, states: SparseStates | None = None
    ) -> None:
        self._batch, self._rows = batch, rows
        self._states = states
        self._shape = torch.Size([*batch_size, batch.shape[-1]])
        self._time = len(batch_size)
        self._count = 0
        self._copied: list[tuple[_Key, torch.Size]] = []  # at every step
        self._carried: list[_Carried] = []
        self._memory: StepMemory | None = None  # of both, in this order

    def write(self, step: int, tensordict: Step) -> None:
        """Copy the entries of a step into the batch.

        Raises:
            ArgumentError: the shape of an entry doesn't begin with the batch size.
            UsageError: the entries differ from those of the first step.
        """
        found = leaves_by_path(tensordict)
        if self._states is not None:
            self._states.take(step, self._rows, found)
        memory = self._allocate(found) if self._memory is None else self._memory
        if len(found) != self._count:
            self._refuse(step, found)
        numbers, values = list(range(len(self._copied))), list[Tensor]()
        for key, shape in self._copied:
            value = found.get(key)
            if value is None or value.shape != shape:
                self._refuse(step, found)
            values.append(value)
        for number, carried in enumerate(self._carried, len(numbers)):
            value = found.get(carried.key)
            if value is not carried.last or _version(value) != carried.version:
                if value is None or value.shape != carried.shape:
                    self._refuse(step, found)
                carried.starts.append(step)
                numbers.append(number)
                values.append(value)
            carried.last = found[carried.next_key]
            carried.version = _version(carried.last)
        memory.write(step, numbers, values)

    def _allocate(self, found: dict[_Key, Tensor]) -> StepMemory:
        memory: dict[_Key, Tensor] = {}
        first = not len(self._batch.keys())
        for key, value in found.items():
            if value.shape[: self._time] != self._shape[:-1]:
                raise ArgumentError(
                    f"Every entry of a step must begin with the environment's batch size {list(self._shape[:-1])}; "
                    f"{key} has shape {list(value.shape)}."
                )
            if first:
                shape = (*self._batch.shape, *value.shape[self._time :])
                self._batch.set(key, torch.empty(shape, dtype=value.dtype, device=self._batch.device or value.device))
        if not first:
            self._check_alike(found)
        for key in found:
            memory[key] = cast(Tensor, self._batch.get(key))[self._rows].movedim(self._time, 0)
        carried: set[_Key] = set()
        for key, value in found.items():
            next_key = (NEXT, *key)
            after = found.get(next_key)
            if after is not None and (after.shape, after.dtype) == (value.shape, value.dtype):
                carried.add(key)
                self._carried.append(_Carried(key, next_key, value.shape, memory[key], memory[next_key]))
        self._copied = [(key, value.shape) for key, value in found.items() if key not in carried]
        self._count = len(found)
        written = [key for key, _ in self._copied] + [carried.key for carried in self._carried]
        self._memory = StepMemory([memory[key] for key in written], self._time)
        return self._memory

    def _check_alike(self, found: dict[_Key, Tensor]) -> None:
        """Refuse entries that differ from those of the rows of another writer."""
        kinds = {key: (value.shape[self._time :], value.dtype) for key, value in found.items()}
        wanted = {key: (value.shape[self._time + 1 :], value.dtype) for key, value in leaves(self._batch)}
        differ = sorted(str(key) for key in kinds.keys() | wanted if kinds.get(key) != wanted.get(key))
        if differ:
            raise UsageError(
                f"All rows must write the same entries with the same shapes and dtypes; {', '.join(differ)} differ "
                "between the groups of the environment. Let the policy always write the same keys."
            )

    def _refuse(self, step: int, found: dict[_Key, Tensor]) -> NoReturn:
        shapes = {key: value.shape for key, value in found.items()}
        first = dict(self._copied) | {carried.key: carried.shape for carried in self._carried}
        differ = sorted(str(key) for key in shapes.keys() | first if shapes.get(key) != first.get(key))
        raise UsageError(
            f"Every step must write the same entries with the same shapes; step {step} differs from the first in "
            f"{', '.join(differ)}. Let the policy and the environment always write the same keys."
        )

    def finish(self) -> None:
        """Complete the rows of the batch."""
        for carried in self._carried:
            carried.finish()
        if self._states is not None:
            self._states.finish(self._batch)


def truncate_last(after: TensorDictBase) -> None:
    """Set ``truncated`` and ``done`` at the last step of a batch, in rows that aren't done.

    Args:
        after: what is under ``"next"``, ``[*B, T]``.
    """
    done = after.get(DONE)[..., -1, :]
    after.get(TRUNCATED)[..., -1, :].logical_or_(~done)
    done.fill_(True)


class _Carried:
    """A root entry that is carried over from the previous step's ``next``.

    Args:
        key: key of the entry.
        next_key: key of the entry under ``next``.
        shape: shape of a step's value.
        root: memory of the root entry, ``[T, *B, ...]``.
        after: memory of the entry under ``next``, ``[T, *B, ...]``.

    Attributes:
        last: value under ``next`` at the previous step.
        version: version counter of ``last`` at that time.
        starts: steps whose value differs from the previous step's value under ``next``.
    """

    def __init__(self, key: _Key, next_key: _Key, shape: torch.Size, root: Tensor, after: Tensor) -> None:
        self.key = key
        self.next_key = next_key
        self.shape = shape
        self.last: Tensor | None = None
        self.version: object = None
        self.starts: list[int] = []
        self._root = root
        self._after = after

    def finish(self) -> None:
        """Copy the values that were not copied before."""
        for start, stop in pairwise((*self.starts, len(self._root))):
            if stop > start + 1:
                self._root[start + 1 : stop].copy_(self._after[start : stop - 1])


def _version(tensor: Tensor | None) -> object:
    """Return the version counter of ``tensor``; if it has none, an object that is unequal to all others."""
    try:
        return None if tensor is None else edits_of(tensor)
    except RuntimeError:  # an inference tensor
        return object()
