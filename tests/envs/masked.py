"""Small Gymnasium environments with action masks."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

spaces = gym.spaces


def counting_mask(time, n, first=0):
    """Allow the choice determined by the time, and the next one."""
    return np.array([(choice - time - first) % n < 2 for choice in range(n)])


class MaskedEnv(gym.Env):
    """Allows two of ``n`` choices, different ones at each step, and rejects the rest; ends after ``length`` steps.

    The mask is in the observation, in ``info``, or in both (then that of ``info`` is wrong); at the end it is empty.
    """

    def __init__(
        self, where="observation", entry="action_mask", n=4, length=5, dtype=np.int8, truncates=False, empty_at=None
    ):
        self.where, self.entry, self.n, self.length, self.dtype = where, entry, n, length, dtype
        self.truncates, self.empty_at = truncates, empty_at
        self.action_space = spaces.Discrete(n)
        box = spaces.Box(0, np.inf, (1,), np.float32)
        mask = spaces.Box(0, 1, (n,), np.int8) if dtype is np.int8 else spaces.MultiBinary(n)
        self.observation_space = spaces.Dict({"time": box, entry: mask}) if where != "info" else box
        self.resets = 0

    def mask(self):
        allowed = counting_mask(self.time, self.n)
        over = self.time >= self.length and not self.truncates
        return (allowed & (not over) & (self.time != self.empty_at)).astype(self.dtype)

    def _out(self):
        time = np.array([self.time], np.float32)
        observation = {"time": time, self.entry: self.mask()} if self.where != "info" else time
        wrong = 1 - self.mask() if self.where == "both" else self.mask()
        return observation, {} if self.where == "observation" else {self.entry: wrong}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.resets += 1
        return self._out()

    def step(self, action):
        if not counting_mask(self.time, self.n)[action]:
            raise RuntimeError(f"choice {action} is not allowed at {self.time}")
        self.time += 1
        over = self.time >= self.length
        observation, info = self._out()
        return observation, 1.0, over and not self.truncates, over and self.truncates, info

    def get_state(self):
        return {"time": self.time}

    def set_state(self, state):
        self.time = state["time"]


class MaskedRows(VectorEnv):
    """Native vector version of the same environment: row i ends after ``i + 2`` steps."""

    def __init__(self, num_envs, mode=AutoresetMode.SAME_STEP, n=4, final=True):
        self.num_envs, self.mode, self.n, self.final = num_envs, mode, n, final
        self.metadata = {"autoreset_mode": mode}
        self.single_action_space = spaces.Discrete(n)
        self.single_observation_space = spaces.Box(0, np.inf, (1,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.time = np.zeros(num_envs, int)

    def _info(self):
        return {"action_mask": np.stack([counting_mask(time, self.n) for time in self.time]).astype(np.int8)}

    def _observe(self):
        return self.time[:, None].astype(np.float32)

    def reset(self, *, seed=None, options=None):
        mask = np.ones(self.num_envs, bool) if options is None else options["reset_mask"]
        self.time[mask] = 0
        return self._observe(), self._info()

    def step(self, actions):
        assert self._info()["action_mask"][np.arange(self.num_envs), actions].all()
        self.time += 1
        done = self.time >= np.arange(self.num_envs) + 2
        last, info = self._observe(), self._info()
        if self.mode is AutoresetMode.SAME_STEP and done.any():
            final = {"final_info": info} if self.final else {}
            self.time[done] = 0
            info = {**self._info(), "final_obs": last, "_final_obs": done, **final}
        return self._observe(), np.ones(self.num_envs), np.zeros_like(done), done, info


gym.register("RecurlTest/Masked-v0", MaskedEnv)


ACTION_SPACES = {
    "start": spaces.Discrete(3, start=5),
    "multi": spaces.MultiDiscrete([2, 3, 4]),
    "matrix of integers": spaces.MultiDiscrete([[2, 3], [4, 4]]),
    "multi with start": spaces.MultiDiscrete([2, 2], start=[1, -3]),
    "binary": spaces.MultiBinary(3),
    "matrix of bits": spaces.MultiBinary([2, 2]),
    "scalar": spaces.Box(-2.0, 1.0, (), np.float32),
    "matrix": spaces.Box(-2.0, 1.0, (2, 3), np.float64),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "dict": spaces.Dict({"move": spaces.Discrete(4), "aim": spaces.Box(-1.0, 1.0, (2,), np.float32)}),
    "tuple": spaces.Tuple([spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(2), spaces.Discrete(2, start=1)]),
    "nested": spaces.Dict(
        {
            "arm": spaces.Tuple([spaces.Discrete(3), spaces.Box(-np.inf, np.inf, (), np.float32)]),
            "leg": spaces.MultiBinary(1),
        }
    ),
}
"""Every kind of action."""


def _arrays(action):
    """Return the action with arrays instead of NumPy scalars, for which ``Box.contains`` warns."""
    if isinstance(action, dict):
        return {name: _arrays(part) for name, part in action.items()}
    if isinstance(action, tuple):
        return tuple(map(_arrays, action))
    return np.asarray(action) if isinstance(action, np.floating) else action


class AnyActionEnv(gym.Env):
    """Observes three random numbers, rejects actions outside the space ``kind``, and ends after ``length`` steps."""

    def __init__(self, kind, length=6):
        self.kind, self.length = kind, length
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = ACTION_SPACES[kind]

    def _observe(self):
        return self.np_random.normal(size=3).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def step(self, action):
        if not self.action_space.contains(_arrays(action)):
            raise RuntimeError(f"{action!r} is not in {self.action_space}")
        self.time += 1
        return self._observe(), 1.0, self.time >= self.length, False, {}

    def get_state(self):
        return {"time": self.time, "rng": self.np_random.bit_generator.state}

    def set_state(self, state):
        self.time = state["time"]
        self.np_random.bit_generator.state = state["rng"]


gym.register("RecurlTest/AnyAction-v0", AnyActionEnv)
