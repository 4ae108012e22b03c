"""An environment whose steps take time and no CPU, for whoever collects with actors; gymnasium and NumPy alone."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np

ROWS = 8
STEPS = 40  # of a vector, in a batch of one actor: a second of sleep
SECONDS = 0.025


class Sleeping(gym.vector.VectorEnv[Any, Any, Any]):
    """Observes zeros; a step of all rows sleeps once. Episodes never end.

    Args:
        rows: number of environments.
        seconds: duration of a step.
        autoreset_mode: what it says of itself, to those who ask.
    """

    def __init__(
        self, rows: int = ROWS, seconds: float = SECONDS, autoreset_mode: Any = gym.vector.AutoresetMode.DISABLED
    ) -> None:
        self.num_envs = rows
        self.metadata = {"autoreset_mode": autoreset_mode}
        self.single_observation_space = gym.spaces.Box(-1, 1, (4,))
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, rows)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, rows)
        self._seconds = seconds

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin."""
        return np.zeros((self.num_envs, 4), np.float32), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Sleep."""
        time.sleep(self._seconds)
        never = np.zeros(self.num_envs, bool)
        return np.zeros((self.num_envs, 4), np.float32), np.ones(self.num_envs), never, never, {}
