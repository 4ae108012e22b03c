"""Entries that a buffer adds to a sample, and that are removed when the sample is added to a buffer."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.keys import DONE, IS_INIT, MASK, STORED, TRAJ_STEPS, NestedKey, path_of
from recurl.lowering import Step

__all__ = ["ENTRIES", "INDEX", "PRIORITY_WEIGHT", "WRITE_STEP", "fitting", "mark_ends", "mark_starts", "restore"]

INDEX = "index"
PRIORITY_WEIGHT = "priority_weight"
WRITE_STEP: NestedKey = ("collector", "write_step")
ENTRIES: dict[str, NestedKey] = {
    "index": INDEX,
    "write_step": WRITE_STEP,
    "mask": MASK,
    "priority_weight": PRIORITY_WEIGHT,
}
"""Keys under which a sample holds what a sampler says of it."""


def mark_starts(sample: Step, starts: Tensor) -> None:
    """Set ``"is_init"`` of a sample ``[N, ...]`` where ``starts``, bool ``[N]`` (or rows, ``[S, L]``), is true.

    All samples are marked here, whatever the sampler. In an item of several steps the first one is marked. The marks
    are written to a new tensor; the stored flag is kept at ``("collector", "stored", "is_init")``.
    """
    _override(sample, IS_INIT, starts)


def mark_ends(sample: Step, ends: Tensor, truncated_key: NestedKey) -> None:
    """Set ``truncated_key``, and ``"done"`` beside it, where ``ends``, bool ``[N]``, is true; see ``mark_starts``."""
    _override(sample, truncated_key, ends)
    _override(sample, DONE if isinstance(truncated_key, str) else (*truncated_key[:-1], DONE), ends)


def _override(sample: Step, key: NestedKey, marks: Tensor) -> None:
    stored = cast(Tensor | None, sample.get(key, None))
    if stored is None:
        stored = torch.zeros((*sample.batch_size, 1), dtype=torch.bool, device=marks.device)
    marks = marks.to(stored.device, non_blocking=True)
    marked = stored.bool() if stored.dtype != torch.bool else stored.clone()
    lead = marks.ndim
    marked.view(*marked.shape[:lead], -1)[..., 0] |= marks
    sample.set(key, marked)
    stored_key = (*STORED, *path_of(key))
    if stored_key not in sample:  # if a sample is marked again, the first value is the stored one
        sample.set(stored_key, stored)


def restore(data: TensorDictBase, keys: Collection[NestedKey]) -> tuple[TensorDictBase, Tensor | None]:
    """Undo the changes that a buffer made to a sample.

    Args:
        data: a sample of a buffer, or any other data. It is not modified.
        keys: entries of the sample to keep; all if empty.

    Returns:
        For a sample, its stored entries without padding, and the marks ``"is_init"`` of the sample; for other data,
        ``data`` itself and None.
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
    """Drop trajectory steps if the stored ``keys`` don't include them, as in a buffer saved by version 0.1.0."""
    return data.exclude(TRAJ_STEPS) if keys and TRAJ_STEPS not in keys else data
