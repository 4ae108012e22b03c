"""Options of SAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.ranges import Fraction, Number, Positive
from recurl.trainers.algorithms.critics_config import CriticsConfig


@dataclass(frozen=True, kw_only=True)
class SACConfig(CriticsConfig):
    """Options of SAC: soft actor-critic with recurrent actor and critics, from a replay buffer.

    Raises:
        ArgumentError: see :class:`CriticsConfig`.

    Example:
        >>> config = SACConfig(env="recurl/MaskedPendulum-v1", cell="gru")
        >>> SACConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "sac"

    alpha: Positive = 0.01
    """Temperature, the weight of the entropy, at the start."""
    fixed_alpha: bool = False
    """Keep the temperature; otherwise it is learnt."""
    target_entropy: Number | None = None
    """Entropy in nats that the temperature is to give, with real actions scaled to [-1, 1]; by default minus their
    number, and --target-entropy-fraction of the largest entropy for choices."""
    target_entropy_fraction: Fraction = 0.1
    """Fraction of the entropy of uniform choices that the temperature is to give."""
