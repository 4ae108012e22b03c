"""Entries that a replay buffer adds to a sample, and removes if the sample is added to a buffer again."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.keys import DONE, IS_INIT, MASK, STORED, TRAJ_STEPS, NestedKey, path_of
from recurl.sequences.entries import Step

__all__ = [
    "ENTRIES",
    "INDEX",
    "PRIORITY_WEIGHT",
    "WRITE_STEP",
    "mark_ends",
    "mark_starts",
    "restore",
    "without_unstored_steps",
]

INDEX = "index"
PRIORITY_WEIGHT = "priority_weight"
WRITE_STEP: NestedKey = ("collector", "write_step")
ENTRIES: dict[str, NestedKey] = {
    "index": INDEX,
    "write_step": WRITE_STEP,
    "mask": MASK,
    "priority_weight": PRIORITY_WEIGHT,
}
"""Sample keys of the information returned by a sampler."""


def mark_starts(sample: Step, starts: Tensor) -> None:
    """Set ``"is_init"`` of a sample ``[N, ...]`` where ``starts``, bool ``[N]`` (or rows, ``[S, L]``), is true.

    All samples are marked here, for any sampler. In an item of several steps, the first one is marked. The marks
    are written to a new tensor; the stored flag is kept at ``("collector", "stored", "is_init")``.
    """
    _override(sample, IS_INIT, starts)


def mark_ends(sample: Step, ends: Tensor, truncated_key: NestedKey) -> None:
    """Set ``truncated_key`` and the sibling ``"done"`` where ``ends``, bool ``[N]``, is true; see ``mark_starts``."""
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
    if stored_key not in sample:  # if a sample is marked repeatedly, the first value is the stored one
        sample.set(stored_key, stored)


def restore(data: TensorDictBase, keys: Collection[NestedKey]) -> tuple[TensorDictBase, Tensor | None]:
    """Undo the changes made to a sample by a buffer.

    Args:
        data: a sample from a buffer, or any other data. It is not modified.
        keys: entries of the sample to keep; all if empty.

    Returns:
        For a sample, its stored entries without padding, and its ``"is_init"`` marks; for other data, ``data`` itself
        and None.
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


def without_unstored_steps(data: TensorDictBase, keys: Collection[NestedKey]) -> TensorDictBase:
    """Drop trajectory steps if they are not among the stored ``keys``, as in a buffer saved by version 0.1.0."""
    return data.exclude(TRAJ_STEPS) if keys and TRAJ_STEPS not in keys else data
