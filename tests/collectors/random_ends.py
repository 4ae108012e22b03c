"""An environment whose episodes end at random, and recurrent policies for it."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.envs import GymWrapper
from recurl.modules import GRUModule, LSTMModule

CELLS = {"lstm": LSTMModule, "gru": GRUModule}


def make_policy(cell: str = "lstm", *, inputs: int = 4, dtype: torch.dtype = torch.float32, **options: object) -> Seq:
    torch.manual_seed(0)
    module = CELLS[cell](inputs, 8, in_key="observation", out_key="features", dtype=dtype, **options)
    head = Mod(nn.Linear(8, 2, dtype=dtype), ["features"], ["logits"])
    return Seq(module, head, Mod(lambda logits: logits.argmax(-1), ["logits"], ["action"]))


class RandomEnds(gym.Env):
    """Float64 observations; episodes end at random, terminated or truncated."""

    observation_space = gym.spaces.Box(-10, 10, (4,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self.np_random.normal(size=4), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        end = self.np_random.random()
        return self.np_random.normal(size=4), 1.0, bool(end < 0.1), bool(end > 0.9), {}


def random_ends(rows: int | None) -> GymWrapper:
    if rows is None:
        return GymWrapper(RandomEnds())
    mode = gym.vector.AutoresetMode.DISABLED
    return GymWrapper(gym.vector.SyncVectorEnv([RandomEnds] * rows, autoreset_mode=mode))
