"""Environment specs: the entries of a step, and which of them are carried to the next root."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from recurl.core.errors import ArgumentError
from recurl.core.keys import ACTION, COLLECTOR, DONE_KEYS, NEXT, RESET, REWARD, NestedKey, path_of
from recurl.core.specs import Binary, Composite, TensorSpec, Unbounded, declare, has_mask

__all__ = ["EnvSpecs"]

_RESERVED = (ACTION, COLLECTOR, *DONE_KEYS, NEXT, RESET, REWARD)
"""Entries of a step other than observations and states, which can't use these names."""


class EnvSpecs:
    """Specs of an environment; base class of :class:`~recurl.envs.EnvBase`.

    Args:
        observation_spec: spec of the entries of the root and of ``next``, for one environment (no batch dimensions).
        action_spec: spec of the action, for one environment.
        reward_spec: spec of the reward, for one environment; float32 ``[1]`` when None.
        state_spec: spec of the entries other than the action that a step reads from the root, for one environment;
            empty when None.
        batch_size: number of environments stepped together: ``[]`` or ``[n]``.
        device: device of all tensors.

    Attributes:
        batch_size: number of environments stepped together.
        device: device of all tensors.
    """

    def __init__(
        self,
        observation_spec: Composite,
        action_spec: TensorSpec,
        reward_spec: TensorSpec | None,
        state_spec: Composite | None,
        batch_size: torch.Size,
        device: torch.device | None,
    ) -> None:
        self.batch_size = batch_size
        self.device = device
        self._action_unbatched = action_spec.to(self.device)
        self._action = self._batched(action_spec)
        self._observation = self._batched(observation_spec)
        self._state = self._batched(Composite() if state_spec is None else state_spec)
        self._reward = self._batched(Unbounded(1, dtype=torch.float32) if reward_spec is None else reward_spec)
        self._done = self._batched(Composite({key: Binary((1,)) for key in DONE_KEYS}))
        self._plan_carry()

    def _batched(self, spec: Any) -> Any:
        return spec.expand(*self.batch_size, *spec.shape).to(self.device)

    def _plan_carry(self) -> None:
        """Collect the keys carried from ``next`` to the root: observations, states, and done flags."""
        _check_entries(self._observation, self._state)
        specs = (self._observation, self._state, self._done)
        self._carried: dict[NestedKey, None] = dict.fromkeys(key for spec in specs for key in spec.keys(True, True))
        self._nested = any(isinstance(key, tuple) for key in self._carried)
        self._masked = has_mask(self._observation, self._action_unbatched)

    @property
    def observation_spec(self) -> Composite:
        """Entries of the root and of ``next`` (without reward and done flags), including batch dimensions."""
        return self._observation

    @property
    def state_spec(self) -> Composite:
        """Entries other than the action that a step reads from the root; carried like observations."""
        return self._state

    @property
    def action_spec(self) -> Any:
        """Spec of the action, including batch dimensions."""
        return self._action

    @property
    def action_spec_unbatched(self) -> Any:
        """Spec of one environment's action, without batch dimensions."""
        return self._action_unbatched

    @property
    def full_action_spec(self) -> Composite:
        """Composite with the action spec under its key, including batch dimensions."""
        return Composite({ACTION: self.action_spec}, shape=self.batch_size, device=self.device)

    @property
    def full_action_spec_unbatched(self) -> Composite:
        """Composite with the action spec of one environment under its key."""
        return Composite({ACTION: self.action_spec_unbatched}, device=self.device)

    @property
    def reward_spec(self) -> Any:
        """Spec of the reward, ``[*B, 1]``."""
        return self._reward

    @property
    def done_spec(self) -> Composite:
        """Specs of ``done``, ``terminated``, and ``truncated``, bool ``[*B, 1]``."""
        return self._done

    def fake_tensordict(self) -> TensorDict:
        """Return a TensorDict of zeros with the entries of a step: root, action, and ``next``."""
        root = TensorDict({}, self.batch_size, device=self.device)
        for spec in (self.observation_spec, self.state_spec, self.done_spec):
            root.update(spec.zero())
        after = root.copy().set(REWARD, self.reward_spec.zero())
        return root.set(ACTION, self.action_spec.zero()).set(NEXT, after.clone())


def _check_entries(observation: Composite, state: Composite) -> None:
    """Raise if observations and states would overwrite each other or another entry of a step.

    Raises:
        ArgumentError: an entry conflicts; the message names it.
    """
    for key in (*observation.keys(True, True), *state.keys(True, True)):
        name = path_of(key)[0]
        if name in _RESERVED:
            raise ArgumentError(
                f"An observation or state can't be named {key!r}, because {name!r} is another entry of a step: rename "
                "it, or drop it with GymWrapper(env, drop_observations=[...])."
            )
    merged = observation.clone()
    for key, spec in state.items(True, True):
        declare(merged, key, spec)
