"""Options of IMPALA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.ranges import Count, Inside, Positive, Steps
from recurl.trainers.algorithms.on_policy_config import OverlappedConfig


@dataclass(frozen=True, kw_only=True)
class ImpalaConfig(OverlappedConfig):
    """Options of IMPALA: an actor and a critic that learn from batches of older weights, corrected by V-trace.

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
    """Environment steps to train for at most, summed over the environments."""
    num_envs: Count = 16
    """Environments stepped side by side."""
    rollout_steps: Count = 16
    """Steps of each environment between two updates: the length of the sequences that are learnt from."""
    learning_rate: Positive = 3e-3
    """Step size of Adam, at the start."""
    rho_thresh: Positive = 1.0
    """Largest importance weight of a temporal difference and an advantage."""
    c_thresh: Positive = 1.0
    """Largest importance weight of the trace."""
    clip_epsilon: Inside | None = None
    """Learn by PPO's clipped ratio to the policy that acted (APPO), cut at this distance from 1, instead of by
    truncated importance weights."""
    normalize_advantages: bool = False
    """Shift and scale the advantages of each batch to mean 0 and standard deviation 1."""
    checkpoint_every: Count = 250
    """Updates between two checkpoints."""
