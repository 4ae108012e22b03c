"""Transform that sums rewards over episodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recurl.core.errors import ArgumentError, MissingKeyError
from recurl.core.keys import REWARD
from recurl.core.specs import Composite, Unbounded, declare
from recurl.sequences.entries import Step, takes_entries
from recurl.transforms.base import Transform, fill_reset, makes_memory, reset_mask


class RewardSum(Transform):
    """Transform that sums the rewards of each episode: float32 ``[*B, 1]``, 0 at the root after a reset.

    Under ``next`` the sum includes the reward of that step, so it is the return of the episode where ``done`` is set.

    Args:
        in_keys: reward entries; ``["reward"]`` when None.
        out_keys: names of the sums; ``"episode_"`` followed by the reward's name when None.

    Raises:
        ArgumentError: ``in_keys`` and ``out_keys`` differ in length.
        MissingKeyError: the root to step has no sum (it does not originate from a reset).

    Example:
        >>> from recurl.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), RewardSum())
        >>> env.rollout(3)["next", "episode_reward"].squeeze(-1)
        tensor([1., 2., 3.])
    """

    def __init__(self, in_keys: Sequence[str] | None = None, out_keys: Sequence[str] | None = None) -> None:
        self.in_keys = [REWARD] if in_keys is None else list(in_keys)
        self.out_keys = [f"episode_{key}" for key in self.in_keys] if out_keys is None else list(out_keys)
        if len(self.in_keys) != len(self.out_keys):
            raise ArgumentError(f"RewardSum needs one out_key per in_key, got {self.in_keys} and {self.out_keys}.")

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec with the sums."""
        spec = observation_spec.clone()
        for key in self.out_keys:
            declare(spec, key, Unbounded(*spec.shape, 1, device=spec.device, dtype=torch.float32))
        return spec

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None, tensordict_reset: Step) -> Step:
        mask = reset_mask(tensordict)
        for key in self.out_keys:
            tensordict_reset.set(key, fill_reset(mask, 0.0, tensordict_reset, key, (1,), torch.float32))
        return tensordict_reset

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step, next_tensordict: Step) -> Step:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            if out_key not in tensordict:
                raise MissingKeyError(
                    f"The root to step lacks {out_key!r}: pass a root returned by env.reset() or step_mdp."
                )
            next_tensordict.set(out_key, tensordict[out_key] + next_tensordict[in_key])
        return next_tensordict

    def __repr__(self) -> str:
        return f"RewardSum({self.in_keys}, {self.out_keys})"
