"""Observation noise, drawn when an episode begins."""

from __future__ import annotations

import math
from typing import Any

from gymnasium.spaces import Box

from recurl.core.errors import ArgumentError
from recurl.envs.tasks.dynamics import Dynamics, State
from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.envs.tasks.popgym.cards import entry_at


class Noisy(Dynamics):
    """Mixin that adds normal noise to the observations of a task and clips them to their Box.

    List it before the task among the base classes.

    As in the package, the noise is rounded to float32 before it is added.

    State: that of the task, and `noise_0`, `noise_1`, ..., float64 `[step_limit + 1, rows]`, unscaled.

    Attributes:
        noise_sigma: standard deviation of the noise; see :func:`check_sigma`.
    """

    observation_space: Box
    noise_sigma: float

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Return the initial state of the task, and the noise of the episode."""
        return {**super().begin(xp, draw), **{name: draw.normal((self.step_limit + 1,)) for name in self._noise_names}}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Take a step of the task."""
        after, reward, terminated = super().advance(xp, state, steps, actions)
        return {**{name: state[name] for name in self._noise_names}, **after}, reward, terminated

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the observations with the noise of their step."""
        drawn = [entry_at(xp, state[name], steps) for name in self._noise_names]
        noise = xp.astype(self.noise_sigma * xp.stack(drawn, axis=1), xp.float32)
        space = self.observation_space
        return xp.clip(super().observe(xp, state, steps) + noise, xp.asarray(space.low), xp.asarray(space.high))

    @property
    def _noise_names(self) -> list[str]:
        return [f"noise_{place}" for place in range(len(self.observation_space.low))]


def check_sigma(noise_sigma: float) -> float:
    """Return a standard deviation after checking it.

    Raises:
        ArgumentError: the value is not positive and finite.
    """
    if not 0 < noise_sigma < math.inf:
        raise ArgumentError(f"noise_sigma must be positive and finite; got {noise_sigma!r}")
    return noise_sigma
