"""Environments and callbacks for failing ranks."""

import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

STEPS = 80


class Slow(gym.Env):
    """Fails or hangs on rank 1, after some updates."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fails=False, hangs=False):
        self._fails, self._hangs = fails, hangs
        self._steps = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        if os.environ.get("RANK") == "1" and self._steps > STEPS:
            if self._fails:
                raise RuntimeError("no more")
            while self._hangs:
                time.sleep(1)
        return np.zeros(2, np.float32), 0.0, self._steps % 8 == 0, False, {}


if "recurl-test/Slow-v0" not in gym.registry:  # imported under two names: its own, and that of its doctests
    gym.register("recurl-test/Slow-v0", entry_point=Slow, disable_env_checker=True)


class KillOnce:
    """Kills rank 0 after its twelfth update, once."""

    def on_start(self, trainer):
        self._mark = Path(trainer.folder.path) / "killed"

    def on_update(self, row):
        if row["update"] == 12 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
