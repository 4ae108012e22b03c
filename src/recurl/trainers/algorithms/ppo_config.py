"""Options of PPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from recurl.errors import ArgumentError
from recurl.ranges import Count, Fraction, Inside, NotNegative
from recurl.trainers.algorithms.on_policy_config import OverlappedConfig
from recurl.trainers.config import Schedule


@dataclass(frozen=True, kw_only=True)
class PPOConfig(OverlappedConfig):
    """Options of PPO: proximal policy optimisation with a recurrent actor and critic.

    Raises:
        ArgumentError: see :class:`OverlappedConfig`; or more minibatches than sequences.

    Example:
        >>> config = PPOConfig(env="recurl/RepeatPrevious-v0", env_kwargs=("k=8",), cell="gru")
        >>> config.env_arguments
        {'k': 8}
        >>> PPOConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "ppo"
    epochs: Count = 4
    """Passes over a batch per update."""
    minibatches: Count = 4
    """Gradient steps per pass."""
    sequence_length: Count = 32
    """Length of the sequences that rows are cut into for the update; each starts from the state stored there."""
    gae_lambda: Fraction = 0.95
    """Decay of generalised advantage estimation."""
    clip_epsilon: Inside = 0.2
    """Distance of the probability ratio from 1 beyond which its gradient is cut, at the start."""
    clip_epsilon_schedule: Schedule = "constant"
    """How it falls to zero over --total-steps."""

    clip_value: NotNegative = 0.0
    """Distance of a value from the collected one beyond which its gradient is cut; 0 for no bound."""

    @property
    def gradient_steps_per_batch(self) -> int:
        """Into how many gradient steps a batch is divided."""
        return self.minibatches

    @property
    def learnt_length(self) -> int:
        """Steps of the sequences that are learnt from."""
        return min(self.sequence_length, self.rollout_steps)

    def check(self) -> None:
        """Refuse more minibatches than sequences, and a CUDA graph or overlap where it can't work."""
        super().check()
        pieces = -(-self.rollout_steps // self.sequence_length)
        if self.minibatches > self.num_envs * pieces:
            raise ArgumentError(
                f"--minibatches must not exceed the {self.num_envs * pieces} sequences of a batch "
                f"({self.num_envs} environments x {pieces}), got {self.minibatches}: lower it, raise --num-envs "
                "or lower --sequence-length."
            )
        if self.cuda_graph and (self.rollout_steps % self.learnt_length or self.num_envs * pieces % self.minibatches):
            raise ArgumentError(
                "--cuda-graph needs minibatches of the same size: --sequence-length must divide --rollout-steps, and "
                f"--minibatches the {self.num_envs * pieces} sequences of a batch; got {self.sequence_length} for "
                f"{self.rollout_steps}, and {self.minibatches}."
            )

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`RunConfig.complete`; ``anneal``, of version 0.1, becomes schedules."""
        values = dict(values)
        if "anneal" in values:
            schedule = "linear" if values.pop("anneal") else "constant"
            values = {"learning_rate_schedule": schedule, "entropy_coeff_schedule": schedule, **values}
        return super().complete(values)
