"""Options of IMPALA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.core.ranges import Count, OpenUnit, Positive, Steps
from recurl.trainers.algorithms.on_policy_config import OverlappedConfig


@dataclass(frozen=True, kw_only=True)
class ImpalaConfig(OverlappedConfig):
    """Options of IMPALA: an actor-critic that learns from batches of older policies, corrected by V-trace.

    Raises:
        ArgumentError: see :class:`OverlappedConfig`.

    Example:
        >>> config = ImpalaConfig(env="recurl/TMaze-v0", cell="gru", clip_epsilon=0.2)
        >>> ImpalaConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "impala"
    usual_lag: ClassVar[int] = 1

    total_steps: Steps = 300_000
    """Maximum number of environment steps to train for, summed over all environments."""
    num_envs: Count = 16
    """Number of environments stepped in parallel."""
    rollout_steps: Count = 16
    """Steps per environment between updates: the length of the training sequences."""
    learning_rate: Positive = 3e-3
    """Initial learning rate of Adam."""
    rho_thresh: Positive = 1.0
    """Truncation level (rho-bar) of the importance weights of temporal differences and advantages."""
    c_thresh: Positive = 1.0
    """Truncation level (c-bar) of the importance weights of the trace."""
    clip_epsilon: OpenUnit | None = None
    """Clip the probability ratio to the behavior policy at this distance from 1, as in PPO (APPO), instead of using
    truncated importance weights."""
    normalize_advantages: bool = False
    """Normalize the advantages of each batch to mean 0 and standard deviation 1."""
    checkpoint_every: Count = 250
    """Updates between checkpoints."""
