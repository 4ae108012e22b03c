"""Options of SAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.core.ranges import Fraction, Number, Positive
from recurl.trainers.algorithms.critics_config import CriticsConfig


@dataclass(frozen=True, kw_only=True)
class SACConfig(CriticsConfig):
    """Options of SAC: soft actor-critic with recurrent networks and a replay buffer.

    Raises:
        ArgumentError: see :class:`CriticsConfig`.

    Example:
        >>> config = SACConfig(env="recurl/MaskedPendulum-v1", cell="gru")
        >>> SACConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "sac"

    alpha: Positive = 0.01
    """Initial temperature, the weight of the entropy."""
    fixed_alpha: bool = False
    """Keep the temperature fixed instead of learning it."""
    target_entropy: Number | None = None
    """Target entropy in nats, with continuous actions scaled to [-1, 1]; by default minus the number of action
    dimensions, or --target-entropy-fraction of the maximum entropy for discrete actions."""
    target_entropy_fraction: Fraction = 0.1
    """Target entropy of discrete actions as a fraction of the entropy of the uniform distribution."""
