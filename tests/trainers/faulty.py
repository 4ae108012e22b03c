"""An environment that returns non-finite numbers at given steps; importable by workers."""

import gymnasium as gym
import numpy as np

from recurl.core.seeding import env_seed


class Faulty(gym.Env):
    """Environment with episodes of nine steps and faults at given steps.

    Args:
        where: the faulty entry: ``"reward"``, ``"observation"`` (of a step) or ``"reset"`` (observation of a reset).
        number: the non-finite number.
        steps: faulty steps, counted from 1 over all episodes: one (``"40"``) or a range (``"37-42"``); none by default.
        row: which of four environments is faulty, in a run with seed 0.
        continuous: use continuous actions.
    """

    observation_space = gym.spaces.Box(-10, 10, (2,))

    def __init__(self, where="reward", number="nan", steps="0", row=1, continuous=False):
        self.action_space = gym.spaces.Box(-1, 1, (1,)) if continuous else gym.spaces.Discrete(2)
        self._where, self._number, self._row = where, float(number), row
        begin, _, end = str(steps).partition("-")
        self._bad = range(int(begin), int(end or begin) + 1)
        self._life = 0
        self._mine = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self._mine = (seed - env_seed(0, "training")) % 4 == self._row
        self._step = 0
        return self._observe("reset"), {}

    def step(self, action):
        self._step += 1
        self._life += 1
        reward = self._number if self._is_bad("reward") else 1.0
        return self._observe("observation"), reward, self._step == 9, False, {}

    def _observe(self, what):
        return np.array([self._number if self._is_bad(what) else self._step / 10, 1.0], np.float32)

    def _is_bad(self, what):
        return self._mine and what == self._where and self._life in self._bad


gym.register("recurl-test/Faulty-v0", entry_point=Faulty, disable_env_checker=True)
