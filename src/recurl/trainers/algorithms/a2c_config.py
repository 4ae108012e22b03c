"""Options of A2C."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.ranges import Count, Fraction, Positive, Steps
from recurl.trainers.algorithms.on_policy_config import OnPolicyConfig


@dataclass(frozen=True, kw_only=True)
class A2CConfig(OnPolicyConfig):
    """Options of A2C: advantage actor-critic, one gradient step for each batch.

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
    """Environment steps to train for at most, summed over the environments."""
    num_envs: Count = 16
    """Environments stepped side by side."""
    rollout_steps: Count = 16
    """Steps of each environment between two updates: the length of the sequences that are learnt from."""
    learning_rate: Positive = 3e-3
    """Step size of Adam, at the start."""
    gae_lambda: Fraction = 0.95
    """Decay of generalised advantage estimation; 1 takes all rewards of a batch."""
    normalize_advantages: bool = False
    """Shift and scale the advantages of each batch to mean 0 and standard deviation 1."""
    checkpoint_every: Count = 250
    """Updates between two checkpoints."""
