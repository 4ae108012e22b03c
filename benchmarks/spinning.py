"""A wrapper that makes environments slow."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym


class Spin(gym.Wrapper):
    """Wrapper that keeps a core busy for some time after every step."""

    def __init__(self, env: gym.Env[Any, Any], microseconds: float = 100.0) -> None:
        super().__init__(env)
        self._seconds = microseconds * 1e-6

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        until = time.perf_counter() + self._seconds
        while time.perf_counter() < until:
            pass
        return result
