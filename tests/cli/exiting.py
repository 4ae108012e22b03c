"""An environment and a callback that exit the process, a slow environment, and one that fails."""

from __future__ import annotations

import os
import sys
import time

import gymnasium as gym
import numpy as np


class Exiting(gym.Env):
    """Environment that calls sys.exit(0) or os._exit(0): after 50 steps, or on construction, reset or close."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, at="step", kind="exit"):
        self.at, self.kind, self.steps = at, kind, 0
        self.leave("make")

    def leave(self, at):
        if at == self.at and self.kind == "exit":
            sys.exit(0)
        if at == self.at and self.kind == "raise":
            raise GeneratorExit
        if at == self.at:
            os._exit(0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.leave("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps > 50:
            self.leave("step")
        return np.zeros(2, np.float32), 0.0, self.steps % 7 == 0, False, {}

    def close(self):
        self.leave("close")


class Slow(Exiting):
    """Environment in which one step takes half a second."""

    def __init__(self):
        super().__init__(at="never")

    def step(self, action):
        if self.steps == 20:
            time.sleep(0.5)
        return super().step(action)


class Failing(gym.Env):
    """Environment that raises an error at a step, and ends an episode at another if ``end`` is given."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, at=6, end=None):
        self.at, self.end, self.time = at, end, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        if self.time == self.at:
            raise KeyError("the wheel\ncame off")
        return np.zeros(1, np.float32), 0.0, self.time == self.end, False, {}


class Callback:
    def on_batch(self, batch):
        sys.exit(0)


gym.register("recurl-test/Exiting-v0", Exiting)
gym.register("recurl-test/Slow-v0", Slow)
gym.register("recurl-test/Failing-v0", Failing)
