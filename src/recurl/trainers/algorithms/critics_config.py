"""Options of the off-policy actor-critic algorithms, SAC and TD3."""

from __future__ import annotations

from dataclasses import dataclass

from recurl.core.ranges import Count, NonNegativeInt, PositiveFraction, SmallCount
from recurl.trainers.algorithms.replay_config import ReplayConfig


@dataclass(frozen=True, kw_only=True)
class CriticsConfig(ReplayConfig):
    """Options of SAC and TD3.

    Raises:
        ArgumentError: see :class:`ReplayConfig`.
    """

    num_envs: Count = 8
    """Number of environments stepped in parallel."""
    learning_starts: NonNegativeInt = 1_000
    """Environment steps before the first update."""
    gradient_steps: Count = 8
    """Gradient steps per update."""
    slices: Count = 16
    """Number of trajectory slices per gradient step."""
    n_steps: Count = 3
    """Number of rewards summed before bootstrapping (n-step return)."""
    scale_rewards: bool = True
    """Divide rewards by the current running standard deviation of the discounted return when they are sampled."""
    shared_trunk: bool = True
    """Share the encoder and recurrent layers between actor and critics; otherwise each has its own."""
    critics: SmallCount = 2
    """Number of critics; the minimum of their values is used."""
    target_rate: PositiveFraction = 0.01
    """Soft update coefficient (tau) of the target networks, applied at each gradient step."""
