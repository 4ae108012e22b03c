"""A wrapper that hides velocities."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray


class PositionsOnly(gym.ObservationWrapper[Any, Any, Any]):
    """Keeps the positions of a MuJoCo environment, the first numbers of its observation, and hides velocities."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        model = env.unwrapped.model  # type: ignore[attr-defined] # MuJoCo's
        (size,) = env.observation_space.shape or (0,)
        self._shown = size - model.nv
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (self._shown,), np.float64)

    def observation(self, observation: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the positions."""
        return observation[: self._shown]
