"""What a buffer writes into a sample, and takes out again when a sample is added to a buffer."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.keys import DONE, IS_INIT, MASK, STORED, TRAJ_STEPS, NestedKey

__all__ = ["INDEX", "PRIORITY_WEIGHT", "WRITE_STEP", "fitting", "mark_ends", "mark_starts", "restore"]

INDEX = "index"
PRIORITY_WEIGHT = "priority_weight"
WRITE_STEP: NestedKey = ("collector", "write_step")


def mark_starts(sample: TensorDictBase, starts: Tensor) -> None:
    """Raise ``"is_init"`` of a sample ``[N, ...]`` where ``starts``, bool ``[N]``, is true.

    The one place where samples get their marks, whatever the sampler. Of an item that holds several steps the first is
    marked. The marks go to a fresh entry; the stored flag moves to ``("collector", "stored", "is_init")``.
    """
    _override(sample, IS_INIT, starts)


def mark_ends(sample: TensorDictBase, ends: Tensor, truncated_key: NestedKey) -> None:
    """Raise ``truncated_key``, and ``"done"`` beside it, where ``ends``, bool ``[N]``, is true; see ``mark_starts``."""
    _override(sample, truncated_key, ends)
    _override(sample, DONE if isinstance(truncated_key, str) else (*truncated_key[:-1], DONE), ends)


def _override(sample: TensorDictBase, key: NestedKey, raised: Tensor) -> None:
    stored = cast(Tensor | None, sample.get(key, None))
    if stored is None:
        stored = torch.zeros((*sample.batch_size, 1), dtype=torch.bool, device=raised.device)
    raised = raised.to(stored.device, non_blocking=True)
    marked = stored.bool() if stored.dtype != torch.bool else stored.clone()
    marked.view(marked.shape[0], -1)[:, 0] |= raised
    sample.set(key, marked)
    beside = (*STORED, *((key,) if isinstance(key, str) else key))
    if beside not in sample:  # a sample may be marked further, and then keeps what is stored
        sample.set(beside, stored)


def restore(data: TensorDictBase, keys: Collection[NestedKey]) -> tuple[TensorDictBase, Tensor | None]:
    """Undo what a buffer did to a sample.

    Args:
        data: a sample of a buffer, or any other data. It is not modified.
        keys: the entries to keep of a sample; all if empty.

    Returns:
        For a sample its entries as they were stored, without padding, and the marks ``"is_init"`` of the sample. Other
        data as it is, and None.
    """
    stored = data.get(STORED, None)
    if stored is None:
        return data, None
    mask = data.get(MASK, None)
    data = data.copy() if mask is None else data[mask]
    marks = data.get(IS_INIT)
    for key, value in data.get(STORED).items(True, True):
        data.set(key, value)
    data = data.exclude(STORED, WRITE_STEP, INDEX, PRIORITY_WEIGHT, MASK)
    return (data.select(*keys) if keys else data), marks


def fitting(data: TensorDictBase, keys: Collection[NestedKey]) -> TensorDictBase:
    """Leave trajectory steps out where the stored ``keys`` have none, as in a buffer that version 0.1.0 saved."""
    return data.exclude(TRAJ_STEPS) if keys and TRAJ_STEPS not in keys else data
