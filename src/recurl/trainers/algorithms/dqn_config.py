"""Options of DQN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from recurl.errors import ArgumentError
from recurl.ranges import Count, Fraction, SomeFraction, Whole
from recurl.trainers.algorithms.replay_config import ReplayConfig
from recurl.trainers.config import Schedule


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

    learning_rate_schedule: Schedule = "linear"
    """How it falls to zero over --total-steps."""
    gradient_steps: Count = 8
    """Gradient steps per update."""
    burn_in: Whole | None = None
    """Steps at the start of a slice that only update its hidden state (none where its episode begins); by default a
    quarter of the slice."""
    n_steps: Count = 10
    """Rewards summed before the bootstrap, at most."""
    double: bool = True
    """Choose actions by the network, and take their values from the target network (double DQN)."""
    value_rescaling: bool = True
    """Learn values on a compressed scale, for returns of different magnitudes."""
    greedy_returns: bool = True
    """End a sum of rewards before the first action that the network wouldn't choose now: those of old policies would
    count against the state that they were in."""
    target_rate: SomeFraction = 0.01
    """Fraction by which the target network follows the network, per gradient step."""
    target_interval: Count | None = None
    """Gradient steps between two copies of the weights to the target network, instead of --target-rate."""

    eps_init: Fraction = 1.0
    """Probability of a random action at the start."""
    eps_end: Fraction = 0.05
    """Probability of a random action at the end of the exploration."""
    exploration_fraction: Fraction = 0.3
    """Fraction of the run over which that probability decays linearly."""

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`RunConfig.complete`."""
        of_old = "eps_init" in values and "greedy_returns" not in values
        return super().complete({**values, "greedy_returns": False} if of_old else values)

    def check(self) -> None:
        """Refuse options that don't fit together."""
        super().check()
        if self.eps_end > self.eps_init:
            raise ArgumentError(f"--eps-end must not exceed --eps-init, got {self.eps_end} and {self.eps_init}.")
