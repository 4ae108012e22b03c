"""Detection of trajectory starts in data added to a replay buffer."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.errors import ArgumentError, MissingKeyError
from recurl.core.keys import DONE, IS_INIT, NEXT, TRAJ_IDS, TRAJ_STEPS, NestedKey, normalize_key
from recurl.sequences.index import begins_sequence

__all__ = ["TrajectoryKeys"]

_EPISODE = "episode"
_NEXT_DONE = (NEXT, DONE)


class TrajectoryKeys:
    """Detector of the steps that begin a trajectory, across calls of ``extend``.

    A step begins a trajectory where ``"is_init"`` is true, where ``("collector", "traj_ids")`` changes, where
    ``("collector", "traj_steps")`` does not increase by one, where ``traj_key`` changes, and after a step where
    ``end_key`` is true. If neither key is given, the first of ``("collector", "traj_ids")``, ``"episode"`` and
    ``("next", "done")`` in the data is used. Data without any of them, or with items of several steps each, is treated
    as unrelated items.

    Args:
        traj_key: entry with one trajectory id per step, an integer.
        end_key: entry with one bool per step, True at the last step of a trajectory.

    Raises:
        ArgumentError: ``traj_key`` and ``end_key`` are both given.
    """

    def __init__(self, traj_key: NestedKey | None = None, end_key: NestedKey | None = None) -> None:
        if traj_key is not None and end_key is not None:
            raise ArgumentError(f"Give traj_key or end_key, not both; got {traj_key!r} and {end_key!r}.")
        self._requested = None if traj_key is None and end_key is None else normalize_key(traj_key or end_key)
        self._end_keys = (_NEXT_DONE,) if end_key is None else (normalize_key(end_key),)
        self.chosen: NestedKey | None = None
        """The key in use; None before the first data is added, and for unrelated items."""
        self._last: dict[NestedKey, Tensor] = {}
        self._cut = True

    def starts(
        self,
        data: object,
        shape: tuple[int, int],
        items: int = 1,
        marks: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Return the mask of the new steps that begin a trajectory, bool ``[lanes, n]`` on ``device``.

        The first step of each row is compared with the last one of the previous call. The last values are always kept
        in the same memory.

        Args:
            data: the new steps, in row-major order.
            shape: number of lanes, and number of steps per lane.
            items: number of steps in each item.
            marks: bool, one per step: additional trajectory starts. Passed for samples, which later data never
                continues.
            device: device of the result, and of the values that are kept.

        Raises:
            MissingKeyError: ``traj_key`` or ``end_key`` was given and is not in the data.
            ArgumentError: an entry does not have one value per step.
        """
        unrelated = torch.ones(shape, dtype=torch.bool, device=device)
        if not isinstance(data, TensorDictBase) or items > 1:
            return unrelated
        chosen = self._requested or next((key for key in (TRAJ_IDS, _EPISODE, _NEXT_DONE) if key in data), None)
        if chosen is None:
            return unrelated
        flags, equal, numbers, last = list[Tensor](), list[tuple[Tensor, Tensor]](), None, dict[NestedKey, Tensor]()
        for key in dict.fromkeys((chosen, TRAJ_IDS, TRAJ_STEPS)):
            if key != chosen and key not in data:
                continue
            values = _per_step(data, key, shape).to(device)
            if key in self._end_keys:
                flags.append(_shifted(values.bool(), self._last.get(key, torch.zeros_like(values[:, :1])).bool()))
            elif key == TRAJ_STEPS:
                numbers = _shifted(values, self._last.get(key, values[:, :1] - 1)), values
            else:
                equal.append((_shifted(values, self._last.get(key, values[:, :1])), values))
            last[key] = values[:, -1:]
        if IS_INIT in data:
            flags.append(_per_step(data, IS_INIT, shape).to(device).bool())
        if marks is not None:
            flags.append(marks.to(device).reshape(shape))
        starts = begins_sequence(flags, equal, numbers)
        if self._cut:
            starts[:, :1] = True
        self.chosen, self._cut = chosen, marks is not None
        self._last = {key: self._kept(key, value) for key, value in last.items()}
        return starts

    def _kept(self, key: NestedKey, value: Tensor) -> Tensor:
        memory = self._last.get(key)
        return value.clone() if memory is None or memory.shape != value.shape else memory.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the key in use and the last values, which the next data is compared with."""
        last = {key: value.clone() for key, value in self._last.items()}
        return {"chosen": self.chosen, "last": last, "cut": self._cut}

    def load_state_dict(self, state: dict[str, Any], device: torch.device | str = "cpu") -> None:
        """Restore a :meth:`state_dict`, in place if values are already kept."""
        self.chosen, self._cut = state["chosen"], state["cut"]
        self._last = {key: self._kept(key, value.to(device)) for key, value in state["last"].items()}


def _shifted(values: Tensor, last: Tensor) -> Tensor:
    """Return the values of the previous steps: those ``[lanes, n]`` after the ``last`` one of each lane."""
    return torch.cat([last, values], 1)[:, : values.shape[1]]


def _per_step(data: TensorDictBase, key: NestedKey, shape: tuple[int, int]) -> Tensor:
    value = cast(Tensor | None, data.get(key, None))
    if value is None:
        raise MissingKeyError(
            f"The data must have the entry {key!r}, which identifies trajectories; it has "
            f"{sorted(map(str, data.keys(True, True)))}. Name another entry with traj_key= or end_key=."
        )
    if value.numel() != shape[0] * shape[1]:
        raise ArgumentError(
            f"The entry {key!r} must have one value per step, {shape[0] * shape[1]} in all, got shape "
            f"{tuple(value.shape)} for a batch of shape {tuple(data.batch_size)}."
        )
    return value.detach().reshape(shape)
