"""Options of SAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.ranges import Count, Fraction, Number, Positive, Whole
from recurl.trainers.algorithms.replay_config import ReplayConfig


@dataclass(frozen=True, kw_only=True)
class SACConfig(ReplayConfig):
    """Options of SAC: soft actor-critic with recurrent actor and critics, from a replay buffer.

    Raises:
        ArgumentError: see :class:`ReplayConfig`.

    Example:
        >>> config = SACConfig(env="recurl/MaskedPendulum-v1", cell="gru")
        >>> SACConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "sac"

    head_width: Whole = 64
    """Width of a hidden layer between the memory and each output; 0 for none, but critics of real actions have one."""
    shared_trunk: bool = False
    """Share encoder and memory between actor and critics; otherwise each has its own."""
    critics: Count = 2
    """Critics, of which the smallest value counts."""
    target_rate: Fraction = 0.005
    """Fraction by which the target critics follow the critics, per gradient step."""
    alpha: Positive = 1.0
    """Temperature, the weight of the entropy, at the start."""
    fixed_alpha: bool = False
    """Keep the temperature; otherwise it is learnt."""
    target_entropy: Number | None = None
    """Entropy in nats that the temperature is to give, with real actions scaled to [-1, 1]; by default minus their
    number, and --target-entropy-fraction of the largest entropy for choices."""
    target_entropy_fraction: Fraction = 0.3
    """Fraction of the entropy of uniform choices that the temperature is to give."""
