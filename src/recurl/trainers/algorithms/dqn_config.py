"""Options of DQN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from recurl.core.errors import ArgumentError
from recurl.core.ranges import Count, Fraction, NonNegativeInt, PositiveFraction
from recurl.trainers.algorithms.replay_config import ReplayConfig
from recurl.trainers.config import Schedule


@dataclass(frozen=True, kw_only=True)
class DQNConfig(ReplayConfig):
    """Options of DQN: Q-learning with a recurrent network and a replay buffer.

    Raises:
        ArgumentError: see :class:`ReplayConfig`; or if ``eps_end`` exceeds ``eps_init``.

    Example:
        >>> config = DQNConfig(env="recurl/TMaze-v0", cell="gru", n_steps=3)
        >>> DQNConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "dqn"

    learning_rate_schedule: Schedule = "linear"
    """Decay of the learning rate to zero over --total-steps."""
    gradient_steps: Count = 8
    """Gradient steps per update."""
    burn_in: NonNegativeInt | None = None
    """Steps at the start of a slice that only warm up its hidden state and aren't trained on (none if the slice starts
    an episode); by default a quarter of the slice."""
    n_steps: Count = 10
    """Maximum number of rewards summed before bootstrapping (n-step return)."""
    double: bool = True
    """Double DQN: select actions with the online network and evaluate them with the target network."""
    value_rescaling: bool = True
    """Learn values on a compressed scale, for returns of widely different magnitudes."""
    greedy_returns: bool = True
    """Cut n-step returns before the first action that is no longer greedy, so that actions of older policies don't
    lower the value of the state they started from."""
    target_rate: PositiveFraction = 0.01
    """Soft update coefficient (tau) of the target network, applied at each gradient step."""
    target_interval: Count | None = None
    """Gradient steps between hard updates of the target network, which replace --target-rate."""

    eps_init: Fraction = 1.0
    """Initial probability of a random action."""
    eps_end: Fraction = 0.05
    """Final probability of a random action."""
    exploration_fraction: Fraction = 0.3
    """Fraction of the run over which the probability of a random action decays linearly."""

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert options of any version; see :meth:`RunConfig.complete`."""
        legacy = "eps_init" in values and "greedy_returns" not in values
        return super().complete({**values, "greedy_returns": False} if legacy else values)

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        if self.eps_end > self.eps_init:
            raise ArgumentError(f"--eps-end must not exceed --eps-init, got {self.eps_end} and {self.eps_init}.")
