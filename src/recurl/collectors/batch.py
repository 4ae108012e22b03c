"""Preallocated memory for one batch, filled step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.errors import UsageError
from recurl.keys import TRAJ_IDS

_Key = tuple[str, ...]


def _leaves(tensordict: TensorDictBase, prefix: _Key = ()) -> Iterator[tuple[_Key, Tensor]]:
    for name, value in tensordict.items():
        if isinstance(value, Tensor):
            yield (*prefix, name), value
        else:
            yield from _leaves(cast(TensorDictBase, value), (*prefix, name))


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
        self._slots: dict[_Key, tuple[Tensor, ...]] = {}

    def write(self, step: int, tensordict: TensorDictBase, traj_ids: Tensor) -> None:
        """Copy one step's entries, and its trajectory ids ``[*B]``, into place.

        Raises:
            UsageError: the step has other entries than the first one had.
        """
        if not self._slots:
            self._allocate(tensordict, traj_ids)
        count = 1
        for key, value in _leaves(tensordict):
            slot = self._slots.get(key)
            if slot is None or slot[step].shape != value.shape:
                self._refuse(step, tensordict)
            else:
                slot[step].copy_(value)
                count += 1
        if count != len(self._slots):
            self._refuse(step, tensordict)
        self._slots[TRAJ_IDS][step].copy_(traj_ids)

    def _allocate(self, tensordict: TensorDictBase, traj_ids: Tensor) -> None:
        for key, value in (*_leaves(tensordict), (TRAJ_IDS, traj_ids)):
            rest = value.shape[self._time :]
            memory = torch.empty((*self._shape, *rest), dtype=value.dtype, device=self._device or value.device)
            self._batch.set(key, memory)
            self._slots[key] = memory.unbind(self._time)

    def _refuse(self, step: int, tensordict: TensorDictBase) -> None:
        found = {key: tuple(value.shape) for key, value in _leaves(tensordict)}
        expected = {key: tuple(slots[0].shape) for key, slots in self._slots.items() if key != TRAJ_IDS}
        differ = sorted(str(key) for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
        raise UsageError(
            f"Every step must write the same entries with the same shapes; step {step} differs from the first in "
            f"{', '.join(differ)}. Let the policy and the environment always write the same keys."
        )

    def finish(self) -> TensorDict:
        """Return the batch, its last dimension named ``"time"``."""
        self._batch.refine_names(..., "time")
        return self._batch
