"""Noise on observations, drawn when an episode begins."""

from __future__ import annotations

import math
from typing import Any

from gymnasium.spaces import Box

from recurl.envs.tasks.dynamics import State
from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.envs.tasks.popgym.cards import dealt
from recurl.errors import ArgumentError


class Noise:
    """Normal noise on observations of a box, which they don't leave.

    As in the package, the noise is rounded to float32 before it is added.

    Args:
        space: the box.
        sigma: standard deviation of the noise.
        steps: steps of an episode.

    Raises:
        ArgumentError: `sigma` is not positive and finite.
    """

    def __init__(self, space: Box, sigma: float, steps: int) -> None:
        if not 0 < sigma < math.inf:
            raise ArgumentError(f"noise_sigma must be positive and finite; got {sigma!r}")
        self.sigma, self._space, self._steps = sigma, space, steps

    def begin(self, draw: Draw) -> State:
        """Return the noise of an episode: `noise_0`, `noise_1`, ..., float64 `[steps + 1, rows]` each, unscaled."""
        return {f"noise_{place}": draw.normal((self._steps + 1,)) for place in range(len(self._space.low))}

    def keep(self, state: State, after: State) -> State:
        """Return a state after a step with the noise of the one before."""
        return {**{name: value for name, value in state.items() if name.startswith("noise_")}, **after}

    def add(self, xp: Namespace, state: State, steps: Any, observations: Any) -> Any:
        """Return observations with the noise of their step."""
        drawn = [dealt(xp, state[f"noise_{place}"], steps) for place in range(len(self._space.low))]
        noise = xp.astype(self.sigma * xp.stack(drawn, axis=1), xp.float32)
        return xp.clip(observations + noise, xp.asarray(self._space.low), xp.asarray(self._space.high))
