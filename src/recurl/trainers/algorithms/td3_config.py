"""Options of TD3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.errors import ArgumentError
from recurl.ranges import Count, Fraction, NotNegative
from recurl.trainers.algorithms.critics_config import CriticsConfig


@dataclass(frozen=True, kw_only=True)
class TD3Config(CriticsConfig):
    """Options of TD3: a deterministic recurrent actor and twin critics, from a replay buffer.

    Raises:
        ArgumentError: see :class:`CriticsConfig`; or noise that grows.

    Example:
        >>> config = TD3Config(env="recurl/MaskedPendulum-v1", cell="gru")
        >>> TD3Config.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "td3"

    policy_delay: Count = 2
    """Gradient steps of the critics for each one of the actor and the targets."""
    policy_noise: NotNegative = 0.2
    """Standard deviation of the noise on the targets' actions, in halves of the range."""
    noise_clip: NotNegative = 0.5
    """Largest such noise."""
    noise_init: NotNegative = 1.0
    """Standard deviation of the noise on actions during collection at the start, in halves of the range."""
    noise_end: NotNegative = 0.1
    """That at the end of the exploration."""
    exploration_fraction: Fraction = 0.1
    """Fraction of the run over which the noise decays linearly."""

    def check(self) -> None:
        """Refuse options that don't fit together."""
        super().check()
        if self.noise_end > self.noise_init:
            raise ArgumentError(
                f"--noise-end must not exceed --noise-init, got {self.noise_end} and {self.noise_init}."
            )
