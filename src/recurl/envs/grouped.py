"""Groups of environments, concatenated into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from recurl.core.errors import ArgumentError
from recurl.envs.base import EnvBase
from recurl.envs.batched import BatchedEnv
from recurl.envs.parameters import Parameter
from recurl.envs.workers_env import EnvInfo

__all__ = ["GroupedEnv"]


class GroupedEnv(BatchedEnv):
    """Environments ``[B]`` with equal specs, concatenated in order into one environment ``[n * B]``.

    They can also be stepped one by one, as :attr:`groups`: a :class:`~recurl.collectors.Collector` computes the actions
    of one group while another steps, if they step in worker processes (:func:`parallel_groups`).

    Args:
        groups: the environments.

    Raises:
        ArgumentError: the specs differ, ``groups`` is empty, or a batch size is not ``[B]``.

    Example:
        >>> from recurl.envs import GymEnv
        >>> env = GroupedEnv([GymEnv("CartPole-v1", num_envs=2) for _ in range(2)])
        >>> env.rollout(3)["observation"].shape
        torch.Size([4, 3, 4])
    """

    def __init__(self, groups: Sequence[EnvBase]) -> None:
        if not groups or any(len(group.batch_size) != 1 for group in groups):
            sizes = [list(group.batch_size) for group in groups]
            raise ArgumentError(f"Groups must be environments with one batch dimension, [B], got {sizes}.")
        super().__init__([EnvInfo.of(group) for group in groups], concatenate=True)
        self._members = list(groups)

    @property
    def groups(self) -> list[EnvBase]:
        """The environments."""
        return list(self._members)

    @property
    def full_resets(self) -> int:  # type: ignore[override] # counted by the groups
        """Number of full resets, summed over the groups."""
        return sum(group.full_resets for group in self._members)

    def _split(self, tensordict: TensorDictBase | None) -> Sequence[TensorDictBase | None]:
        return [None] * self.num_workers if tensordict is None else tensordict.split(self._rows)

    def _root(self, tensordict: Any) -> Any:
        parts = zip(self._members, self._split(tensordict), strict=True)
        return torch.cat([group._root(part) for group, part in parts])

    def _next(self, tensordict: Any) -> Any:
        parts = zip(self._members, self._split(tensordict), strict=True)
        return torch.cat([group._next(part) for group, part in parts])

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDict:
        return self._root(tensordict)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        return self._next(tensordict)

    def _set_parameters(self, values: dict[str, Parameter]) -> None:
        for group in self._members:
            group.set_parameters(values)

    def _set_seed(self, seed: int) -> None:
        for index, group in enumerate(self._members):
            group.set_seed(seed + index * self._rows)

    @property
    def state_obstacle(self) -> str | None:
        """Reason why the state of a group can't be saved; None if all can."""
        return next((found for group in self._members if (found := group.state_obstacle) is not None), None)

    def get_state(self) -> dict[str, Any]:
        """Return the states of all groups.

        Raises:
            UnsupportedError: a group can't save its state.
        """
        return {"envs": [group.get_state() for group in self._members]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore states returned by :meth:`get_state`."""
        for group, saved in zip(self._members, self._saved_envs(state), strict=True):
            group.set_state(saved)

    def _close(self) -> None:
        for group in self._members:
            group.close()
