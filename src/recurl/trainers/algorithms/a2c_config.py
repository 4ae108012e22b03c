"""Options of A2C."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.core.ranges import Count, Fraction, Positive, Steps
from recurl.trainers.algorithms.on_policy_config import OnPolicyConfig


@dataclass(frozen=True, kw_only=True)
class A2CConfig(OnPolicyConfig):
    """Options of A2C: advantage actor-critic with one gradient step per batch.

    Raises:
        ArgumentError: see :class:`OnPolicyConfig`.

    Example:
        >>> config = A2CConfig(env="recurl/TMaze-v0", cell="gru")
        >>> A2CConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "a2c"
    largest_lag: ClassVar[int | None] = 0

    total_steps: Steps = 300_000
    """Maximum number of environment steps to train for, summed over all environments."""
    num_envs: Count = 16
    """Number of environments stepped in parallel."""
    rollout_steps: Count = 16
    """Steps per environment between updates: the length of the training sequences."""
    learning_rate: Positive = 3e-3
    """Initial learning rate of Adam."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalized advantage estimation; 1 uses all rewards of a batch."""
    normalize_advantages: bool = False
    """Normalize the advantages of each batch to mean 0 and standard deviation 1."""
    checkpoint_every: Count = 250
    """Updates between checkpoints."""
