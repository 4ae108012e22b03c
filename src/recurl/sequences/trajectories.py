"""Unique trajectory ids, and step numbers within trajectories."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.keys import AGENT_MASK, MASK, TRAJ_IDS, TRAJ_STEPS

__all__ = ["TRAJECTORY_IDS", "Trajectories", "TrajectoryIds", "mask_absent_agents", "next_trajectories"]

_BLOCK = 2**40


class TrajectoryIds:
    """Source of trajectory ids that are unique in this process and the workers it starts.

    A process counts within a block of 2^40 ids; each worker gets its own block.

    Example:
        >>> ids = TrajectoryIds()
        >>> ids.take(torch.Size([2]), None), ids.take(torch.Size([]), None)
        (tensor([0, 1]), tensor(2))
        >>> ids.reserve() == 2**40
        True
    """

    def __init__(self) -> None:
        self._next = 0
        self._last_block = 0
        self._lock = threading.Lock()

    def take(self, shape: torch.Size, device: torch.device | None) -> Tensor:
        """Return new ids, int64 of ``shape``."""
        count = shape.numel()
        first = self.claim(count)
        return torch.arange(first, first + count, device=device).reshape(shape)

    def claim(self, count: int) -> int:
        """Claim ``count`` consecutive new ids and return the first."""
        with self._lock:
            first, self._next = self._next, self._next + count
        return first

    def skip(self, used: Tensor) -> None:
        """Skip the ids ``used``, and their blocks for new workers."""
        last = int(used.max())
        with self._lock:
            self._last_block = max(self._last_block, last // _BLOCK)
            if last // _BLOCK == self._next // _BLOCK:
                self._next = max(self._next, last + 1)

    def reserve(self) -> int:
        """Reserve a block of ids for a worker and return its first id."""
        with self._lock:
            self._last_block += 1
            return self._last_block * _BLOCK

    def start_at(self, first: int) -> None:
        """Continue with the ids from ``first``; called in a worker with the start of its block."""
        with self._lock:
            self._next = first


TRAJECTORY_IDS = TrajectoryIds()
"""Trajectory ids of this process."""


class Trajectories:
    """Current trajectory of every row: its id and the number of its next step.

    Args:
        batch_size: batch size of the rows, ``[*B]``.
        device: device of the ids.

    Attributes:
        ids: ids of the current trajectories, int64 ``[*B]``; valid between batches.

    Example:
        >>> rows = Trajectories(torch.Size([2]), None)
        >>> ids, numbers = rows.advance(torch.tensor([[False, True, False], [False, False, False]]))
        >>> numbers
        tensor([[0, 1, 0],
                [0, 1, 2]])
        >>> (ids[:, 1:] == ids[:, :-1]).tolist()
        [[True, False], [True, True]]
    """

    def __init__(self, batch_size: torch.Size, device: torch.device | None) -> None:
        self._batch_size = batch_size
        self._device = device
        self.start_new()

    def start_new(self) -> None:
        """Start new trajectories in all rows."""
        self.ids = TRAJECTORY_IDS.take(self._batch_size, self._device)
        self._steps = torch.zeros_like(self.ids)

    def start_new_rows(self, rows: Tensor) -> None:
        """Start new trajectories in the rows of the mask, bool ``[*B]``; call between batches."""
        self.ids = torch.where(rows, TRAJECTORY_IDS.take(self._batch_size, self._device), self.ids)
        self._steps = self._steps.masked_fill(rows, 0)

    def advance(self, done: Tensor) -> tuple[Tensor, Tensor]:
        """Advance by a batch of steps.

        Args:
            done: whether a trajectory ended with each step, bool ``[*B, T]``; not read from the device.

        Returns:
            The trajectory id of each step and its number within the trajectory, both int64 ``[*B, T]``.
        """
        time = torch.arange(1, done.shape[-1] + 1, device=done.device)
        began = torch.where(done, time, -self._steps.unsqueeze(-1)).cummax(-1).values  # start, for the step after each
        # The id of a trajectory that starts after a step is determined by that step and row.
        before = TRAJECTORY_IDS.claim(done.numel()) - self.ids.numel()
        rows = torch.arange(before, before + self.ids.numel(), device=self._device).reshape(*self._batch_size, 1)
        ids = torch.where(began > 0, torch.add(rows, began, alpha=rows.numel()), self.ids.unsqueeze(-1))
        now = self.ids.unsqueeze(-1), self._steps.unsqueeze(-1)
        following = ids, time - began
        self.ids, self._steps = (values[..., -1].clone() for values in following)
        first, second = (torch.cat((a, b[..., :-1]), -1) for a, b in zip(now, following, strict=True))
        return first, second

    def number(self, batch: TensorDictBase, done: Tensor) -> None:
        """Advance by a batch of steps and write ids and step numbers to it, on its device; see :meth:`advance`."""
        for key, value in zip((TRAJ_IDS, TRAJ_STEPS), self.advance(done), strict=True):
            batch.set(key, value.to(batch.device or "cpu"))
        mask_absent_agents(batch)

    def reserve(self, count: int) -> list[Tensor]:
        """Return the trajectories as arguments of :func:`next_trajectories`, with ids reserved for ``count`` steps."""
        rows = self._batch_size.numel()
        first = TRAJECTORY_IDS.claim(count * rows)
        new = torch.arange(first, first + rows, device=self._device).reshape(self._batch_size)
        return [self.ids, self._steps, new]

    def advance_to(self, trajectories: Sequence[Tensor]) -> None:
        """Continue from trajectories that :func:`next_trajectories` has advanced."""
        self.ids, self._steps, _ = trajectories

    def state_dict(self) -> dict[str, Tensor]:
        """Return the ids and the numbers of the next steps."""
        return {"traj_ids": self.ids.clone(), "traj_steps": self._steps.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`; one without step numbers (from version 0.1.0) starts new trajectories."""
        if "traj_steps" in state:
            saved = (state["traj_ids"], state["traj_steps"])
            self.ids, self._steps = (value.to(device=self._device, copy=True) for value in saved)
        else:
            self.start_new()


def next_trajectories(trajectories: Sequence[Tensor], done: Tensor) -> list[Tensor]:
    """Return the trajectories after a step.

    Args:
        trajectories: trajectories before the step: ids, step numbers, and ids of trajectories that start after it,
            int64 ``[*B]`` each.
        done: whether each trajectory ended with the step, bool ``[*B]``.

    Example:
        >>> rows = Trajectories(torch.Size([2]), None)
        >>> before = rows.reserve(8)
        >>> ids, numbers, _ = next_trajectories(before, torch.tensor([True, False]))
        >>> numbers.tolist(), (ids == before[0]).tolist(), (ids == before[2]).tolist()
        ([0, 1], [False, True], [True, False])
    """
    ids, numbers, new = trajectories
    return [torch.where(done, new, ids), (numbers + 1).masked_fill(done, 0), new + done.numel()]


def mask_absent_agents(batch: TensorDictBase) -> None:
    """Write ``("collector", "mask")`` from ``"agent_mask"``, if the batch has it; they share memory.

    Args:
        batch: collected steps, ``[*B, T]``.
    """
    mask = batch.get(AGENT_MASK, None)
    if mask is not None:
        batch.set(MASK, mask.squeeze(-1))
