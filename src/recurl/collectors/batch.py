"""Preallocated memory for one batch, filled step by step."""

from __future__ import annotations

from itertools import pairwise
from typing import NoReturn

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.entries import Entries, leaves
from recurl.errors import ArgumentError, UsageError
from recurl.keys import NEXT, TRAJ_IDS

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
        self._shapes: dict[_Key, torch.Size] = {}
        self._copied: list[_Key] = []  # at every step
        self._slots: list[tuple[Tensor, ...]] = []
        self._carried: dict[_Key, _Carried] = {}

    def write(self, step: int, tensordict: TensorDictBase | Entries, traj_ids: Tensor) -> None:
        """Copy one step's entries, and its trajectory ids ``[*B]``, into place.

        Raises:
            ArgumentError: an entry doesn't begin with the batch size.
            UsageError: the step has other entries than the first one had.
        """
        found = dict(leaves(tensordict))
        found[TRAJ_IDS] = traj_ids
        if not self._slots:
            self._allocate(found)
        if {key: value.shape for key, value in found.items()} != self._shapes:
            self._refuse(step, found)
        for key, carried in self._carried.items():
            carried.write(step, found[key], found[NEXT, *key])
        values = [found[key] for key in self._copied]
        torch._foreach_copy_(self._slots[step], values)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] - no other name

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
        self._shapes = {key: value.shape for key, value in found.items()}
        for key in found:
            following = (NEXT, *key)
            if self._shapes.get(following) == self._shapes[key] and found[following].dtype == found[key].dtype:
                self._carried[key] = _Carried(
                    memory[key].movedim(self._time, 0), memory[following].movedim(self._time, 0)
                )
        self._copied = [key for key in found if key not in self._carried]
        self._slots = list(zip(*(memory[key].unbind(self._time) for key in self._copied), strict=True))

    def _refuse(self, step: int, found: dict[_Key, Tensor]) -> NoReturn:
        shapes = {key: value.shape for key, value in found.items()}
        differ = sorted(str(key) for key in shapes.keys() | self._shapes if shapes.get(key) != self._shapes.get(key))
        raise UsageError(
            f"Every step must write the same entries with the same shapes; step {step} differs from the first in "
            f"{', '.join(differ)}. Let the policy and the environment always write the same keys."
        )

    def finish(self) -> TensorDict:
        """Return the batch, its last dimension named ``"time"``."""
        for carried in self._carried.values():
            carried.finish()
        self._batch.refine_names(..., "time")
        return self._batch


class _Carried:
    """A root entry that continues what ``next`` held at the step before.

    Args:
        root: memory of the entry ``[T, *B, ...]``.
        after: memory of the entry under ``next``, likewise.
    """

    def __init__(self, root: Tensor, after: Tensor) -> None:
        self._root = root
        self._after = after
        self._starts: list[int] = []
        self._last: Tensor | None = None
        self._version = -1

    def write(self, step: int, value: Tensor, following: Tensor) -> None:
        """Take a step's ``value``, copied only when it isn't, unedited, the one that followed the step before."""
        if value is not self._last or _version(value) != self._version or self._version < 0:
            self._root[step].copy_(value)
            self._starts.append(step)
        self._last, self._version = following, _version(following)

    def finish(self) -> None:
        """Copy what has been left out."""
        for start, stop in pairwise((*self._starts, len(self._root))):
            if stop > start + 1:
                self._root[start + 1 : stop].copy_(self._after[start : stop - 1])


def _version(tensor: Tensor) -> int:
    """Count of the edits of ``tensor``, -1 where torch doesn't count."""
    return -1 if tensor.is_inference() else tensor._version
