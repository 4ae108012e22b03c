"""Environment whose steps take time but no CPU, for benchmarks of actors. Needs only gymnasium and NumPy."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np

ROWS = 8
STEPS = 40  # vector steps in a batch of one actor: one second of sleep
SECONDS = 0.025


class Sleeping(gym.vector.VectorEnv[Any, Any, Any]):
    """Vector environment that sleeps once per step of all rows. Observations are zeros; episodes never end.

    Args:
        rows: number of environments.
        seconds: duration of a step.
        autoreset_mode: value of ``metadata["autoreset_mode"]``.
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
        """Return the first observations."""
        return np.zeros((self.num_envs, 4), np.float32), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Sleep, then return zeros and a reward of one per row."""
        time.sleep(self._seconds)
        never = np.zeros(self.num_envs, bool)
        return np.zeros((self.num_envs, 4), np.float32), np.ones(self.num_envs), never, never, {}
