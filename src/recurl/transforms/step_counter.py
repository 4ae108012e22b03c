"""Transform that counts steps and limits the length of episodes."""

from __future__ import annotations

import torch

from recurl.core.errors import ArgumentError, MissingKeyError
from recurl.core.keys import DONE, TRUNCATED
from recurl.core.specs import Binary, Bounded, Composite, declare
from recurl.sequences.entries import Step, takes_entries
from recurl.transforms.base import Transform, fill_reset, makes_memory, reset_mask


class StepCounter(Transform):
    """Transform that counts the steps of each episode and, with ``max_steps``, truncates it.

    The count is int64 ``[*B, 1]``: 0 at the root after a reset, and incremented under ``next`` of every step. When it
    reaches ``max_steps``, ``truncated`` (and, with ``update_done``, ``done``) is set under ``next``; ``terminated`` is
    not.

    Args:
        max_steps: maximum length of an episode, at least 1; None for no limit.
        truncated_key: name of the truncation flag.
        step_count_key: name of the count.
        update_done: also set ``done``, so that the episode is reset.

    Raises:
        ArgumentError: ``max_steps`` is below 1.
        MissingKeyError: the root to step has no count (it does not originate from a reset).

    Example:
        >>> from recurl.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(max_steps=3))
        >>> env.rollout(10)["next", "step_count"].squeeze(-1)
        tensor([1, 2, 3])
    """

    def __init__(
        self,
        max_steps: int | None = None,
        truncated_key: str = TRUNCATED,
        step_count_key: str = "step_count",
        update_done: bool = True,
    ) -> None:
        if max_steps is not None and max_steps < 1:
            raise ArgumentError(f"max_steps must be at least 1, or None for no limit, got {max_steps}.")
        self.max_steps = max_steps
        self.truncated_key = truncated_key
        self.step_count_key = step_count_key
        self.update_done = update_done
        self._one = torch.ones((), dtype=torch.int64)  # adding a tensor is faster than adding a number

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec with the count, int64 ``[*B, 1]``."""
        spec = observation_spec.clone()
        count = Bounded(0, torch.iinfo(torch.int64).max, (*spec.shape, 1), spec.device, torch.int64)
        declare(spec, self.step_count_key, count)
        return spec

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """Return the spec with the truncation flag."""
        if self.max_steps is None or self.truncated_key in done_spec:
            return done_spec
        spec = done_spec.clone()
        spec.set(self.truncated_key, Binary((*spec.shape, 1), device=spec.device))
        return spec

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None, tensordict_reset: Step) -> Step:
        mask = reset_mask(tensordict)
        entries = [(self.step_count_key, torch.int64)]
        if self.truncated_key != TRUNCATED and self.max_steps is not None:
            entries.append((self.truncated_key, torch.bool))
        for key, dtype in entries:
            tensordict_reset.set(key, fill_reset(mask, 0, tensordict_reset, key, (1,), dtype))
        return tensordict_reset

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step, next_tensordict: Step) -> Step:
        if self.step_count_key not in tensordict:
            raise MissingKeyError(
                f"The root to step lacks {self.step_count_key!r}: pass a root returned by env.reset() or step_mdp."
            )
        count = tensordict[self.step_count_key] + self._one
        next_tensordict.set(self.step_count_key, count)
        if self.max_steps is not None:
            over = count >= self.max_steps
            known = self.truncated_key in next_tensordict
            next_tensordict.set(self.truncated_key, next_tensordict[self.truncated_key] | over if known else over)
            if self.update_done:
                next_tensordict.set(DONE, next_tensordict[DONE] | over)
        return next_tensordict

    def __repr__(self) -> str:
        return f"StepCounter(max_steps={self.max_steps})"
