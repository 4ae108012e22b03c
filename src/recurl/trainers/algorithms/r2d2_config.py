"""Options of R2D2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.ranges import Inside, NotNegative
from recurl.trainers.algorithms.dqn_config import DQNConfig


@dataclass(frozen=True, kw_only=True)
class R2D2Config(DQNConfig):
    """Options of R2D2: DQN with prioritised slices.

    Raises:
        ArgumentError: see :class:`DQNConfig`.

    Example:
        >>> config = R2D2Config(env="recurl/TMaze-v0", collectors="ray:2")
        >>> [round(epsilon, 5) for epsilon in config.epsilons]
        [0.4, 0.00066]
    """

    algorithm: ClassVar[str] = "r2d2"

    prioritized: bool = True
    """Draw slices in proportion to their temporal-difference errors instead of uniformly."""
    actor_eps: Inside = 0.4
    """Probability of a random action of the first actor of --collectors, in the place of --eps-init and --eps-end."""
    actor_eps_exponent: NotNegative = 7.0
    """That of the i-th of N actors is --actor-eps to the power of 1 + i / (N - 1) times this."""

    @property
    def epsilons(self) -> tuple[float, ...] | None:
        """Probability of random actions of each actor: a ladder, as in Horgan et al., "Ape-X" (2018)."""
        if not self.actors:
            return None
        last = max(self.actors - 1, 1)
        return tuple(self.actor_eps ** (1 + self.actor_eps_exponent * i / last) for i in range(self.actors))
