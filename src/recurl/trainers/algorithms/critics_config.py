"""Options of the actor-critic algorithms that learn from a replay buffer."""

from __future__ import annotations

from dataclasses import dataclass

from recurl.ranges import Count, Few, SomeFraction, Whole
from recurl.trainers.algorithms.replay_config import ReplayConfig


@dataclass(frozen=True, kw_only=True)
class CriticsConfig(ReplayConfig):
    """Options of SAC and TD3.

    Raises:
        ArgumentError: see :class:`ReplayConfig`.
    """

    num_envs: Count = 8
    """Environments stepped side by side."""
    learning_starts: Whole = 1_000
    """Environment steps before the first update."""
    gradient_steps: Count = 8
    """Gradient steps per update."""
    slices: Count = 16
    """Slices of trajectories per gradient step."""
    n_steps: Count = 3
    """Rewards summed before the bootstrap."""
    scale_rewards: bool = True
    """Divide rewards by the running standard deviation of the discounted return, as it is when they are learnt from."""
    shared_trunk: bool = True
    """Share encoder and memory between actor and critics; otherwise each has its own."""
    critics: Few = 2
    """Critics, of which the smallest value counts."""
    target_rate: SomeFraction = 0.01
    """Fraction by which the target critics follow the critics, per gradient step."""
