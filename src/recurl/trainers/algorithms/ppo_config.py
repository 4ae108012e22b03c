"""Options of PPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from recurl.core.errors import ArgumentError
from recurl.core.ranges import Count, Fraction, NonNegative, OpenUnit
from recurl.trainers.algorithms.on_policy_config import OverlappedConfig
from recurl.trainers.config import Schedule


@dataclass(frozen=True, kw_only=True)
class PPOConfig(OverlappedConfig):
    """Options of PPO: proximal policy optimization with a recurrent actor-critic.

    Raises:
        ArgumentError: see :class:`OverlappedConfig`; or if there are more minibatches than sequences.

    Example:
        >>> config = PPOConfig(env="recurl/RepeatPrevious-v0", env_kwargs=("k=8",), cell="gru")
        >>> config.env_arguments
        {'k': 8}
        >>> PPOConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "ppo"
    epochs: Count = 4
    """Number of passes over the batch per update."""
    minibatches: Count = 4
    """Number of minibatches per epoch, each with one gradient step."""
    sequence_length: Count = 32
    """Length of the sequences that rollouts are split into for training; each starts from its stored hidden state."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalized advantage estimation."""
    clip_epsilon: OpenUnit = 0.2
    """Initial clipping range of the probability ratio around 1."""
    clip_epsilon_schedule: Schedule = "constant"
    """Decay of the clipping range to zero over --total-steps."""

    clip_value: NonNegative = 0.0
    """Clipping range of values around those computed during collection; 0 disables value clipping."""

    @property
    def gradient_steps_per_batch(self) -> int:
        """Number of gradient steps that share one pass over a batch."""
        return self.minibatches

    @property
    def sequence_steps(self) -> int:
        """Length of the training sequences."""
        return min(self.sequence_length, self.rollout_steps)

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        pieces = -(-self.rollout_steps // self.sequence_length)
        if self.minibatches > self.num_envs * pieces:
            raise ArgumentError(
                f"--minibatches must not exceed the {self.num_envs * pieces} sequences of a batch "
                f"({self.num_envs} environments x {pieces}), got {self.minibatches}: lower it, raise --num-envs "
                "or lower --sequence-length."
            )
        if self.cuda_graph and (self.rollout_steps % self.sequence_steps or self.num_envs * pieces % self.minibatches):
            raise ArgumentError(
                "--cuda-graph needs minibatches of equal size: --sequence-length must divide --rollout-steps, and "
                f"--minibatches the {self.num_envs * pieces} sequences of a batch; got {self.sequence_length} for "
                f"{self.rollout_steps}, and {self.minibatches}."
            )

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert options of any version, replacing ``anneal`` of version 0.1; see :meth:`RunConfig.complete`."""
        values = dict(values)
        if "anneal" in values:
            schedule = "linear" if values.pop("anneal") else "constant"
            values = {"learning_rate_schedule": schedule, "entropy_coeff_schedule": schedule, **values}
        return super().complete(values)
