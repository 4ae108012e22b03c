"""Preallocated batch, filled step by step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NoReturn, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.collectors.start_states import SparseStates
from recurl.core.errors import ArgumentError, UsageError
from recurl.core.keys import DONE, NEXT, TRUNCATED
from recurl.core.torch_compat import edits_of, foreach_copy_
from recurl.native.memory import StepMemory, has_contiguous_rows
from recurl.sequences.entries import Entries, Step, leaves, leaves_by_path

_Key = tuple[str, ...]
_STAGED_ON = ("cuda",)
_STAGED_BYTES = 4096  # of a row: larger ones, such as images, would take as much memory again


class BatchWriter:
    """Writer of the rows of a batch ``[*B, T]``, allocated at the first step with its keys, shapes and dtypes.

    Unless a row was reset, most root entries of a step are the same tensors as the previous step's ``next`` entries. If
    torch makes the copies, these entries are not copied at every step but at the end, with one copy between resets.

    Args:
        batch: the batch, ``[*B, T]``, initially empty. Its memory is on its device, or, if it has none, on the device
            of the first step's tensors.
        rows: index of the rows to write if other writers write the remaining ones; ``...`` for all.
        batch_size: shape of these rows, ``[*B]``.
        states: storage of recurrent states kept only at the starts of sequences; all states are kept when None.
    """

    def __init__(
        self, batch: TensorDict, rows: Any, batch_size: torch.Size, states: SparseStates | None = None
    ) -> None:
        self._batch, self._rows = batch, rows
        self._states = states
        self._shape = torch.Size([*batch_size, batch.shape[-1]])
        self._time = len(batch_size)
        self.steps = batch.shape[-1]
        self._shapes: dict[_Key, torch.Size] = {}
        self._keys: list[_Key] = []  # copied at every step
        self._places: list[tuple[bool, str]] = []  # of these keys: whether under ``next``, and the name
        self._counts = 0, 0  # numbers of names at the root and under ``next``, if none is nested
        self._repeats: list[_Key] = []  # root values usually equal those under ``next`` at the previous step
        self._carried: list[_Carried] = []
        self._memory: StepMemory | None = None
        self._entries: dict[_Key, Tensor] = {}  # [T, *B, ...]
        self._staged: list[tuple[_Key, Tensor]] = []  # entries copied to the batch at the end, and their destinations

    def write(self, step: int, tensordict: Step) -> None:
        """Copy the entries of a step into the batch.

        Raises:
            ArgumentError: the shape of an entry doesn't begin with the batch size.
            UsageError: the entries differ from those of the first step.
        """
        memory = self._memory
        values = None if memory is None else self._values(tensordict)
        if memory is not None and values is not None:
            if not memory.write(step, values):
                self._refuse(step, leaves_by_path(tensordict))
            return
        found = leaves_by_path(tensordict)
        if self._states is not None:
            self._states.take(step, self._rows, found)
        memory = self._step_memory(found) if memory is None else memory
        if len(found) != len(self._shapes):
            self._refuse(step, found)
        if not memory.write(step, [found.get(key) for key in self._keys]):
            self._refuse(step, found)
        if self._carried:
            self._write_changed(step, found)

    def _write_changed(self, step: int, found: dict[_Key, Tensor]) -> None:
        """Copy the carried entries that differ from the previous step's ``next``."""
        slots, values = list[Tensor](), list[Tensor]()
        for carried in self._carried:
            value = found.get(carried.key)
            if not carried.is_unchanged(value):
                if value is None or value.shape != self._shapes[carried.key]:
                    self._refuse(step, found)
                slots.append(carried.start(step))
                values.append(value)
            carried.keep(found[(NEXT, *carried.key)])
        if slots:
            foreach_copy_(slots, values)

    def _values(self, step: Any) -> list[Any] | None:
        """Return the values to copy for a step without nested entries; None for any other step."""
        after = step.get(NEXT) if type(step) is Entries else None
        if type(after) is not Entries or (len(step), len(after)) != self._counts:
            return None
        get = dict[Any, Any].get
        return [get(after if is_next else step, name) for is_next, name in self._places]

    def _step_memory(self, found: dict[_Key, Tensor]) -> StepMemory:
        """Return the memory written at every step, after allocating the batch for steps like ``found`` if needed."""
        if not self._entries:
            self._allocate(found)
        repeated = [self._keys.index((NEXT, *key)) for key in self._repeats]
        self._memory = StepMemory([self._entries[key] for key in self._keys], self._time, repeated)
        return self._memory

    def _allocate(self, found: dict[_Key, Tensor]) -> None:
        first = not len(self._batch.keys())
        whole: dict[_Key, Tensor] = {}
        for key, value in found.items():
            if value.shape[: self._time] != self._shape[:-1]:
                raise ArgumentError(
                    f"Every entry of a step must begin with the environment's batch size {list(self._shape[:-1])}; "
                    f"{key} has shape {list(value.shape)}."
                )
            self._shapes[key] = value.shape
            if first:
                shape = (*self._batch.shape, *value.shape[self._time :])
                whole[key] = torch.empty(shape, dtype=value.dtype, device=self._batch.device or value.device)
                self._batch.set(key, whole[key])
        if not first:
            self._check_same_entries(found)
            whole = {key: cast(Tensor, self._batch.get(key)) for key in found}
        memory = {
            key: (value if self._rows is ... else value[self._rows]).movedim(self._time, 0)
            for key, value in whole.items()
        }
        self._staged = [(key, view) for key, view in memory.items() if _is_staged(view, self._time)]
        memory.update(
            {key: torch.empty_like(view, memory_format=torch.contiguous_format) for key, view in self._staged}
        )
        self._entries = memory
        repeats = [key for key, value in found.items() if _is_like(found.get((NEXT, *key)), value)]
        for key in [key for key in repeats if not has_contiguous_rows(memory[key], self._time)]:
            repeats.remove(key)
            self._carried.append(_Carried(key, memory[key], memory[(NEXT, *key)]))
        late = {*repeats, *(carried.key for carried in self._carried)}
        self._keys = [*(key for key in found if key not in late), *repeats]
        self._repeats = repeats
        self._plan()

    def _plan(self) -> None:
        """Precompute the locations of entries, if none is nested and all are copied at every step."""
        after = [key for key in self._keys if key[0] == NEXT]
        flat = all(len(key) == 1 + (key[0] == NEXT) for key in self._keys)
        if flat and after and not self._carried and self._states is None:
            self._places = [(len(key) == 2, key[-1]) for key in self._keys]
            self._counts = len(self._keys) - len(after) + 1, len(after)

    def _check_same_entries(self, found: dict[_Key, Tensor]) -> None:
        """Check that the entries match those written by another writer to its rows."""
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
        differ = sorted(str(key) for key in shapes.keys() | self._shapes if shapes.get(key) != self._shapes.get(key))
        raise UsageError(
            f"Every step must write the same entries with the same shapes; step {step} differs from the first in "
            f"{', '.join(differ)}. Let the policy and the environment always write the same keys."
        )

    def memory(self) -> dict[_Key, Tensor] | None:
        """Return the allocated entries, ``[T, *B, ...]``, if steps may also be written to them directly, else None.

        Direct writes must include the root of a step, even if it repeats the ``next`` of the previous step.
        """
        if self._rows is not ... or self._carried or not self._entries:
            return None
        return self._entries if self._states is None else self._entries | self._states.in_place()

    def allocated(self, step: dict[_Key, Tensor]) -> dict[_Key, Tensor] | None:
        """Allocate the batch for steps with these entries, ``[*B, ...]`` each, and return :meth:`memory`."""
        entries = dict(step)
        if self._states is not None:
            self._states.expect(entries)
        self._allocate(entries)
        return self.memory()

    def clear(self) -> None:
        """Release the allocated entries."""
        self._batch.clear()
        self._memory, self._entries, self._carried, self._shapes = None, {}, [], {}

    def finish(self) -> None:
        """Complete the rows of the batch."""
        for carried in self._carried:
            carried.finish()
        for key, view in self._staged:
            view.copy_(self._entries[key])
        if self._states is not None:
            self._states.finish(self._batch)


def _is_staged(memory: Tensor, time: int) -> bool:
    """Return whether the steps of an entry, ``[T, *B, ...]``, are staged in contiguous memory before the batch.

    On a GPU, noncontiguous rows are copied entry by entry, and contiguous rows all at once.
    """
    row = memory.shape[1 + time :].numel() * memory.itemsize
    return memory.device.type in _STAGED_ON and row <= _STAGED_BYTES and not memory[0].is_contiguous()


def _is_like(after: Tensor | None, value: Tensor) -> bool:
    return after is not None and (after.shape, after.dtype) == (value.shape, value.dtype)


def truncate_last(after: TensorDictBase) -> None:
    """Set ``truncated`` and ``done`` at the last step of a batch, in rows that aren't done.

    Args:
        after: the entries under ``"next"``, ``[*B, T]``.
    """
    done = after.get(DONE)[..., -1, :]
    after.get(TRUNCATED)[..., -1, :].logical_or_(~done)
    done.fill_(True)


class _Carried:
    """A root entry carried over from the previous step's ``next``.

    Args:
        key: key of the entry.
        root: memory of the root entry, ``[T, *B, ...]``.
        after: memory of the entry under ``next``, ``[T, *B, ...]``.
    """

    def __init__(self, key: _Key, root: Tensor, after: Tensor) -> None:
        self.key = key
        self._root = root
        self._after = after
        self._last: Tensor | None = None  # value under ``next`` at the previous step
        self._version: object = None  # its version counter at that time
        self._starts: list[int] = []  # steps with a different value

    def is_unchanged(self, value: Tensor | None) -> bool:
        """Return whether the value of a step is the unmodified tensor of the previous step's ``next``."""
        return value is self._last and _version(value) == self._version

    def start(self, step: int) -> Tensor:
        """Record that a step has a different value, and return the destination of this value."""
        self._starts.append(step)
        return self._root[step]

    def keep(self, after: Tensor) -> None:
        """Record the value under ``next``."""
        self._last, self._version = after, _version(after)

    def finish(self) -> None:
        """Copy the values that have not been copied yet."""
        for start, stop in pairwise((*self._starts, len(self._root))):
            if stop > start + 1:
                self._root[start + 1 : stop].copy_(self._after[start : stop - 1])


def _version(tensor: Tensor | None) -> object:
    """Return the version counter of ``tensor``, or a unique object if it has none."""
    try:
        return None if tensor is None else edits_of(tensor)
    except RuntimeError:  # an inference tensor
        return object()
