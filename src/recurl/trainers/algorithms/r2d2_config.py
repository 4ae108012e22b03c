"""Options of R2D2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.core.ranges import NonNegative, OpenUnit
from recurl.trainers.algorithms.dqn_config import DQNConfig


@dataclass(frozen=True, kw_only=True)
class R2D2Config(DQNConfig):
    """Options of R2D2: DQN with prioritized replay of slices.

    Raises:
        ArgumentError: see :class:`DQNConfig`.

    Example:
        >>> config = R2D2Config(env="recurl/TMaze-v0", collectors="ray:2")
        >>> [round(epsilon, 5) for epsilon in config.epsilons]
        [0.4, 0.00066]
    """

    algorithm: ClassVar[str] = "r2d2"

    prioritized: bool = True
    """Sample slices in proportion to their TD errors instead of uniformly (prioritized replay)."""
    actor_eps: OpenUnit = 0.4
    """Exploration probability of the first actor with --collectors, which replaces --eps-init and --eps-end."""
    actor_eps_exponent: NonNegative = 7.0
    """Exponent alpha of the exploration probability of actor i of N: --actor-eps ** (1 + alpha * i / (N - 1))."""

    @property
    def epsilons(self) -> tuple[float, ...] | None:
        """Exploration probability of each actor, spaced geometrically as in Horgan et al., "Ape-X" (2018)."""
        if not self.actors:
            return None
        last = max(self.actors - 1, 1)
        return tuple(self.actor_eps ** (1 + self.actor_eps_exponent * i / last) for i in range(self.actors))
