"""Recurrent policies and environments, wired rightly and wrongly."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.envs import EnvBase, GymWrapper, InitTracker, TransformedEnv
from recurl.modules import CellModule, GRUModule, LSTMModule, get_env_transforms_from_module
from tests.own_cells import FastWeights, MinGRU

CELLS = {
    "lstm": LSTMModule,
    "gru": GRUModule,
    "mingru": partial(CellModule, MinGRU),
    "fastweights": partial(CellModule, FastWeights),
}
SERVED = [("lstm", "pad"), ("gru", "pad"), *((cell, "loop") for cell in CELLS)]  # by which backend


class RandomEnds(gym.Env):
    """Random observations; one episode in ten ends at each step."""

    observation_space = gym.spaces.Box(-10, 10, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.normal(size=4).astype(np.float32), {}

    def step(self, action):
        return self.np_random.normal(size=4).astype(np.float32), 1.0, bool(self.np_random.random() < 0.1), False, {}


def make_env(rows: int | None = 2, *transforms: object, mode: str = "DISABLED") -> EnvBase:
    if rows is None:
        env: EnvBase = GymWrapper(RandomEnds())
    else:
        mode = gym.vector.AutoresetMode[mode]
        env = GymWrapper(gym.vector.SyncVectorEnv([RandomEnds] * rows, autoreset_mode=mode))
    env.set_seed(0)
    for transform in transforms:
        env = env.append_transform(transform)
    return env


def make_policy(cell: str = "gru", *more: nn.Module, **options: object) -> Seq:
    module = CELLS[cell](4, 8, in_key="observation", out_key="features", **options)
    return policy_of(module, *more)


def policy_of(*modules: nn.Module, features: str = "features") -> Seq:
    head = Mod(nn.Linear(8, 2), [features], ["logits"])
    return Seq(*modules, head, Mod(lambda logits: logits.argmax(-1), ["logits"], ["action"]))


def wired(policy: nn.Module, rows: int | None = 2) -> EnvBase:
    return TransformedEnv(make_env(rows), get_env_transforms_from_module(policy))


def tracked(rows: int | None = 2) -> EnvBase:
    return make_env(rows, InitTracker())


def randomize(policy: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in policy.parameters():
            nn.init.normal_(parameter)
    return policy
