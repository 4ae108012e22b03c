"""Small Gymnasium environments that count steps and episodes."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

spaces = gym.spaces


class CountEnv(gym.Env):
    """Observes its step count and ends after ``length`` steps; supports any observation and action space."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, length=4, action_space=None, observation_space=None, truncates=False):
        self.length, self.truncates = length, truncates
        self.action_space = self.action_space if action_space is None else action_space
        self.observation_space = self.observation_space if observation_space is None else observation_space
        self.actions = []
        self.dead = 0
        self.time = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.time = 0
        return self._observe(), {}

    def step(self, action):
        self.dead += self.time >= self.length
        self.actions.append(action)
        self.time += 1
        over = self.time >= self.length
        return self._observe(), float(self.time), over and not self.truncates, over and self.truncates, {}

    def _observe(self):
        if self.observation_space is CountEnv.observation_space:
            return np.array([self.time], np.float32)
        return self.observation_space.sample()


class SavingEnv(CountEnv):
    """CountEnv with a random observation that can save its state."""

    def _observe(self):
        return np.array([self.np_random.random()], np.float32)

    def get_state(self):
        rng = self.np_random.bit_generator.state
        return {"time": np.int64(self.time), "rng": rng, "array": np.arange(2), "pair": (1, 2.5)}

    def set_state(self, state):
        assert isinstance(state["array"], np.ndarray)
        self.time = int(state["time"])
        self.np_random.bit_generator.state = state["rng"]


class RowsEnv(VectorEnv):
    """Row i ends after ``i + 2`` steps; the observation is the step within the episode and the episode number."""

    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs, mode, as_dict=False):
        self.num_envs, self.mode, self.as_dict = num_envs, mode, as_dict
        self.metadata = {"autoreset_mode": mode}
        box = spaces.Box(0, np.inf, (2,), np.float32)
        self.single_observation_space = spaces.Dict({"a": box}) if as_dict else box
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.time, self.episode = np.zeros((2, num_envs), int)

    def _observe(self):
        value = np.stack([self.time, self.episode], -1).astype(np.float32)
        return {"a": value} if self.as_dict else value

    def reset(self, *, seed=None, options=None):
        self.time[:], self.episode[:] = 0, self.episode + 1
        return self._observe(), {}

    def step(self, actions):
        self.time += 1
        done = self.time >= np.arange(self.num_envs) + 2
        info = {}
        if done.any():
            info = {"final_obs": self._observe(), "_final_obs": done}
        self.episode[done] += 1
        self.time[done] = 0
        return self._observe(), np.ones(self.num_envs), done, np.zeros_like(done), info


class NativeSameStep(RowsEnv):
    def __init__(self, num_envs=1, max_episode_steps=None):
        super().__init__(num_envs, AutoresetMode.SAME_STEP)
