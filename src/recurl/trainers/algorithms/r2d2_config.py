"""Options of R2D2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recurl.ranges import Count, Whole
from recurl.trainers.algorithms.dqn_config import DQNConfig


@dataclass(frozen=True, kw_only=True)
class R2D2Config(DQNConfig):
    """Options of R2D2: DQN with prioritised slices, burn-in, longer returns and rescaled values.

    Raises:
        ArgumentError: see :class:`DQNConfig`.
    """

    algorithm: ClassVar[str] = "r2d2"

    burn_in: Whole = 8
    """Steps at the start of a slice that only update its hidden state (none where its episode begins)."""
    n_steps: Count = 5
    """Rewards summed before the bootstrap."""
    value_rescaling: bool = True
    """Learn values on a compressed scale, for returns of different magnitudes."""
    prioritized: bool = True
    """Draw slices in proportion to their temporal-difference errors instead of uniformly."""
