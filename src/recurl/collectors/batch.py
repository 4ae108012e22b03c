"""Preallocated memory for one batch, filled step by step."""

from __future__ import annotations

from itertools import pairwise
from typing import NoReturn

import torch
from tensordict import TensorDict
from torch import Tensor

from recurl._torch import edits_of, foreach_copy_
from recurl.errors import ArgumentError, UsageError
from recurl.keys import NEXT, TRAJ_IDS
from recurl.lowering import Step, leaves

_Key = tuple[str, ...]


class BatchWriter:
    """Memory for ``[*B, T]`` steps: allocated at the first step, with the keys, shapes and dtypes found there.

    Most root entries of a step are those of the ``next`` before, the same tensors unless a row was reset. They aren't
    copied step by step, but in one piece from reset to reset at the end.

    Args:
        batch_size: ``*B``.
        steps: T.
        device: where the memory is; that of the first step's tensors when None.
    """

    def __init__(self, batch_size: torch.Size, steps: int, device: torch.device | None) -> None:
        self._shape = torch.Size([*batch_size, steps])
        self._time = len(batch_size)
        self._device = device
        self._batch = TensorDict({}, self._shape, device=device)
        self._count = 0
        self._copied: list[tuple[_Key, torch.Size]] = []  # at every step
        self._slots: list[tuple[Tensor, ...]] = []
        self._carried: list[_Carried] = []

    def write(self, step: int, tensordict: Step, traj_ids: Tensor) -> None:
        """Copy one step's entries, and its trajectory ids ``[*B]``, into place.

        Raises:
            ArgumentError: an entry doesn't begin with the batch size.
            UsageError: the step has other entries than the first one had.
        """
        found = dict(leaves(tensordict))
        found[TRAJ_IDS] = traj_ids
        if not self._slots:
            self._allocate(found)
        if len(found) != self._count:
            self._refuse(step, found)
        for carried in self._carried:
            value = found.get(carried.key)
            if value is not carried.last or _version(value) != carried.version:
                if value is None or value.shape != carried.shape:
                    self._refuse(step, found)
                carried.copy(step, value)
        values: list[Tensor] = []
        for key, shape in self._copied:
            value = found.get(key)
            if value is None or value.shape != shape:
                self._refuse(step, found)
            values.append(value)
        for carried in self._carried:
            carried.last = found[carried.following]
            carried.version = _version(carried.last)
        foreach_copy_(self._slots[step], values)

    def _allocate(self, found: dict[_Key, Tensor]) -> None:
        memory: dict[_Key, Tensor] = {}
        for key, value in found.items():
            if value.shape[: self._time] != self._shape[:-1]:
                raise ArgumentError(
                    f"Every entry of a step must begin with the environment's batch size {list(self._shape[:-1])}; "
                    f"{key} has shape {list(value.shape)}."
                )
            shape = (*self._shape, *value.shape[self._time :])
            memory[key] = torch.empty(shape, dtype=value.dtype, device=self._device or value.device)
            self._batch.set(key, memory[key])
        carried: set[_Key] = set()
        for key, value in found.items():
            following = (NEXT, *key)
            after = found.get(following)
            if after is not None and (after.shape, after.dtype) == (value.shape, value.dtype):
                carried.add(key)
                parts = (memory[name].movedim(self._time, 0) for name in (key, following))
                self._carried.append(_Carried(key, following, value.shape, *parts))
        self._copied = [(key, value.shape) for key, value in found.items() if key not in carried]
        self._slots = list(zip(*(memory[key].unbind(self._time) for key, _ in self._copied), strict=True))
        self._count = len(found)

    def _refuse(self, step: int, found: dict[_Key, Tensor]) -> NoReturn:
        shapes = {key: value.shape for key, value in found.items()}
        first = dict(self._copied) | {carried.key: carried.shape for carried in self._carried}
        differ = sorted(str(key) for key in shapes.keys() | first if shapes.get(key) != first.get(key))
        raise UsageError(
            f"Every step must write the same entries with the same shapes; step {step} differs from the first in "
            f"{', '.join(differ)}. Let the policy and the environment always write the same keys."
        )

    def finish(self) -> TensorDict:
        """Return the batch, its last dimension named ``"time"``."""
        for carried in self._carried:
            carried.finish()
        self._batch.refine_names(..., "time")
        return self._batch


class _Carried:
    """A root entry that continues what ``next`` held at the step before.

    Args:
        key: of the entry.
        following: its key under ``next``.
        shape: of a step's value.
        root: memory of the entry ``[T, *B, ...]``.
        after: memory of the entry under ``next``, likewise.

    Attributes:
        last: what ``next`` held at the step before.
        version: its count of edits then.
    """

    def __init__(self, key: _Key, following: _Key, shape: torch.Size, root: Tensor, after: Tensor) -> None:
        self.key = key
        self.following = following
        self.shape = shape
        self.last: Tensor | None = None
        self.version: object = None
        self._root = root
        self._after = after
        self._starts: list[int] = []

    def copy(self, step: int, value: Tensor) -> None:
        """Take a step's value that isn't, unedited, the one before."""
        self._root[step].copy_(value)
        self._starts.append(step)

    def finish(self) -> None:
        """Copy what has been left out."""
        for start, stop in pairwise((*self._starts, len(self._root))):
            if stop > start + 1:
                self._root[start + 1 : stop].copy_(self._after[start : stop - 1])


def _version(tensor: Tensor | None) -> object:
    """Count of the edits of ``tensor``; where torch doesn't count, something that equals nothing."""
    try:
        return None if tensor is None else edits_of(tensor)
    except RuntimeError:  # an inference tensor
        return object()
