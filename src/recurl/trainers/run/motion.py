"""How much real-valued actions change from step to step."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.keys import ACTION, MASK, TRAJ_STEPS
from recurl.sequences.entries import leaves

__all__ = ["MOTION", "motion_of", "real_action"]

MOTION = ("action_rate", "action_acceleration")
"""Metrics of real-valued actions: the mean absolute first and second differences of successive actions."""


def real_action(tensordict: TensorDictBase) -> Tensor:
    """Return the real-valued components of the actions in ``[*B]``, ``[*B, n]``."""
    action: Any = tensordict.get(ACTION)
    parts = [action] if isinstance(action, Tensor) else [part for _, part in leaves(action)]
    lead = tensordict.ndim
    return torch.cat([part.reshape(*part.shape[:lead], -1) for part in parts if part.is_floating_point()], -1)


def motion_of(batch: TensorDictBase) -> Tensor:
    """Return the metrics :data:`MOTION` of a batch ``[B, T]``, ``[2]``, on its device, without waiting for it.

    Steps of different episodes, of absent agents, and the first steps of a row, are not compared. NaN without steps to
    compare.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"action": torch.tensor([[[0.0], [1.0], [3.0], [9.0]]])}, [1, 4])
        >>> batch[TRAJ_STEPS] = torch.tensor([[5, 6, 7, 0]])
        >>> motion_of(batch)
        tensor([1.5000, 1.0000])
    """
    steps = batch.get(TRAJ_STEPS).reshape(batch.batch_size)
    goes_on = steps.diff(dim=-1) == 1
    mask = batch.get(MASK, None)
    if mask is not None:
        goes_on = goes_on & mask[..., 1:]
    first = real_action(batch).detach().diff(dim=-2)
    second = first.diff(dim=-2)
    compared = (first, goes_on), (second, goes_on[..., 1:] & goes_on[..., :-1])
    return torch.stack([torch.where(at, change.abs().mean(-1), 0.0).sum() / at.sum() for change, at in compared])
