"""Options of DQN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.errors import ArgumentError
from recurl.ranges import Count, Fraction
from recurl.trainers.algorithms.replay_config import ReplayConfig


@dataclass(frozen=True, kw_only=True)
class DQNConfig(ReplayConfig):
    """Options of DQN: Q-learning with a recurrent network, from a replay buffer.

    Raises:
        ArgumentError: see :class:`ReplayConfig`; or an exploration that grows.

    Example:
        >>> config = DQNConfig(env="recurl/TMaze-v0", cell="gru", n_steps=3)
        >>> DQNConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "dqn"
    n_steps: Count = 3
    """Rewards summed before the bootstrap."""
    double: bool = True
    """Choose actions by the network, and take their values from the target network (double DQN)."""
    value_rescaling: bool = False
    """Learn values on a compressed scale, for returns of different magnitudes."""
    target_rate: Fraction = 0.01
    """Fraction by which the target network follows the network, per gradient step."""
    target_interval: Count | None = None
    """Gradient steps between two copies of the weights to the target network, instead of --target-rate."""

    eps_init: Fraction = 1.0
    """Probability of a random action at the start."""
    eps_end: Fraction = 0.05
    """Probability of a random action at the end of the exploration."""
    exploration_fraction: Fraction = 0.3
    """Fraction of the run over which that probability decays linearly."""

    def check(self) -> None:
        """Refuse options that don't fit together."""
        super().check()
        if self.eps_end > self.eps_init:
            raise ArgumentError(f"--eps-end must not exceed --eps-init, got {self.eps_end} and {self.eps_init}.")
