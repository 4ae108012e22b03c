"""Options of R2D2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.trainers.algorithms.dqn_config import DQNConfig


@dataclass(frozen=True, kw_only=True)
class R2D2Config(DQNConfig):
    """Options of R2D2: DQN with prioritised slices.

    Raises:
        ArgumentError: see :class:`DQNConfig`.
    """

    algorithm: ClassVar[str] = "r2d2"

    prioritized: bool = True
    """Draw slices in proportion to their temporal-difference errors instead of uniformly."""
