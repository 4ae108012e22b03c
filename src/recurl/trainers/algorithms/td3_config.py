"""Options of TD3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.core.errors import ArgumentError
from recurl.core.ranges import Count, Fraction, NonNegative
from recurl.trainers.algorithms.critics_config import CriticsConfig


@dataclass(frozen=True, kw_only=True)
class TD3Config(CriticsConfig):
    """Options of TD3: a deterministic recurrent actor and twin critics with a replay buffer.

    Raises:
        ArgumentError: see :class:`CriticsConfig`; or if ``noise_end`` exceeds ``noise_init``.

    Example:
        >>> config = TD3Config(env="recurl/MaskedPendulum-v1", cell="gru")
        >>> TD3Config.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "td3"

    policy_delay: Count = 2
    """Critic updates per update of the actor and the target networks."""
    policy_noise: NonNegative = 0.2
    """Standard deviation of the noise added to target actions (target policy smoothing), relative to half the action
    range."""
    noise_clip: NonNegative = 0.5
    """Clipping range of the noise added to target actions, relative to half the action range."""
    noise_init: NonNegative = 1.0
    """Initial standard deviation of the exploration noise, relative to half the action range."""
    noise_end: NonNegative = 0.1
    """Final standard deviation of the exploration noise."""
    exploration_fraction: Fraction = 0.1
    """Fraction of the run over which the exploration noise decays linearly."""

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        if self.noise_end > self.noise_init:
            raise ArgumentError(
                f"--noise-end must not exceed --noise-init, got {self.noise_end} and {self.noise_init}."
            )
