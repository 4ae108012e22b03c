"""Preallocated memory for one batch, filled step by step."""

from __future__ import annotations

from typing import NoReturn

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.entries import Entries, leaves
from recurl.errors import ArgumentError, UsageError
from recurl.keys import TRAJ_IDS

_Key = tuple[str, ...]


class BatchWriter:
    """Memory for ``[*B, T]`` steps: allocated at the first step, with the keys, shapes and dtypes found there.

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
        self._keys: list[_Key] = []
        self._shapes: list[torch.Size] = []
        self._slots: list[tuple[Tensor, ...]] = []

    def write(self, step: int, tensordict: TensorDictBase | Entries, traj_ids: Tensor) -> None:
        """Copy one step's entries, and its trajectory ids ``[*B]``, into place.

        Raises:
            ArgumentError: an entry doesn't begin with the batch size.
            UsageError: the step has other entries than the first one had.
        """
        found = dict(leaves(tensordict))
        if not self._slots:
            self._allocate({**found, TRAJ_IDS: traj_ids})
        found[TRAJ_IDS] = traj_ids
        values = [found[key] for key in self._keys if key in found]
        if len(found) != len(values) or [value.shape for value in values] != self._shapes:
            self._refuse(step, found)
        torch._foreach_copy_(self._slots[step], values)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] - no other name

    def _allocate(self, found: dict[_Key, Tensor]) -> None:
        memory: list[Tensor] = []
        for key, value in found.items():
            if value.shape[: self._time] != self._shape[:-1]:
                raise ArgumentError(
                    f"Every entry of a step must begin with the environment's batch size {list(self._shape[:-1])}; "
                    f"{key} has shape {list(value.shape)}."
                )
            shape = (*self._shape, *value.shape[self._time :])
            memory.append(torch.empty(shape, dtype=value.dtype, device=self._device or value.device))
            self._batch.set(key, memory[-1])
        self._keys = list(found)
        self._slots = list(zip(*(whole.unbind(self._time) for whole in memory), strict=True))
        self._shapes = [slot.shape for slot in self._slots[0]]

    def _refuse(self, step: int, tensors: dict[_Key, Tensor]) -> NoReturn:
        found = {key: value.shape for key, value in tensors.items()}
        expected = dict(zip(self._keys, self._shapes, strict=True))
        differ = sorted(str(key) for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
        raise UsageError(
            f"Every step must write the same entries with the same shapes; step {step} differs from the first in "
            f"{', '.join(differ)}. Let the policy and the environment always write the same keys."
        )

    def finish(self) -> TensorDict:
        """Return the batch, its last dimension named ``"time"``."""
        self._batch.refine_names(..., "time")
        return self._batch
