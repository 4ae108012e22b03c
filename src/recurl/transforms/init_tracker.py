"""Transform that marks the first step of each trajectory."""

from __future__ import annotations

import torch

from recurl.core.errors import ArgumentError
from recurl.core.keys import DONE, IS_INIT
from recurl.core.specs import Binary, Composite, declare
from recurl.sequences.entries import Step, takes_entries
from recurl.transforms.base import Constant, Transform, makes_memory, reset_mask


class InitTracker(Transform):
    """Transform that writes ``is_init``: True at the first step after a reset, where recurrent states are replaced.

    The root entry is bool ``[*B, 1]``. After a partial reset it is True in the rows that were reset. Under ``next`` it
    is always False: the flag belongs to the root of the following step. Appending two trackers is harmless.

    Args:
        init_key: name of the flag.

    Raises:
        ArgumentError: ``init_key`` is not a string (nested, per-agent flags are not supported).

    Example:
        >>> from recurl.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
        >>> env.reset()["is_init"]
        tensor([True])
        >>> env.rollout(2)["is_init"].squeeze(-1)
        tensor([ True, False])
    """

    def __init__(self, init_key: str = IS_INIT) -> None:
        if not isinstance(init_key, str) or not init_key:  # type: ignore[reportUnnecessaryIsInstance] # users
            raise ArgumentError(
                f"init_key must be a non-empty string, got {init_key!r}. A flag for each agent needs no nested key: "
                "with every agent as a row (recurl.envs.MultiAgentEnv), 'is_init' is that of the agent."
            )
        self.init_key = init_key

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec with the flag, bool ``[*B, 1]``."""
        spec = observation_spec.clone()
        declare(spec, self.init_key, Binary((*spec.shape, 1), device=spec.device))
        return spec

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None, tensordict_reset: Step) -> Step:
        mask = reset_mask(tensordict)
        if mask is None:
            flag = torch.ones((*tensordict_reset.batch_size, 1), dtype=torch.bool, device=tensordict_reset.device)
        else:
            flag = tensordict_reset[self.init_key] | mask if self.init_key in tensordict_reset else mask.clone()
        return tensordict_reset.set(self.init_key, flag)

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step, next_tensordict: Step) -> Step:
        return next_tensordict.set(self.init_key, torch.zeros_like(next_tensordict[DONE]))

    def constants(self) -> list[Constant]:
        """Return the flag."""
        return [Constant(self.init_key, at_reset=True, after_step=False)]

    def __repr__(self) -> str:
        return f"InitTracker({self.init_key!r})"
