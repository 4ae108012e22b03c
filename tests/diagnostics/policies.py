"""Recurrent policies and environments with correct and faulty wiring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.diagnostics import CheckResult, check_wiring
from recurl.envs import EnvBase, GymWrapper, InitTracker, TransformedEnv
from recurl.modules import (
    Categorical,
    CellModule,
    FFMModule,
    GatedDeltaNetModule,
    GRUModule,
    GTrXLModule,
    LRUModule,
    LSTMModule,
    Mamba2Module,
    MinGRUModule,
    MinLSTMModule,
    MLSTMModule,
    ProbabilisticActor,
    RGLRUModule,
    S5Module,
    SHMModule,
    SLSTMModule,
    get_env_transforms_from_module,
)
from tests.own_cells import FastWeights, MinGRU
from tests.pairs import paired

CELLS = {
    "lstm": LSTMModule,
    "gru": GRUModule,
    "own_mingru": partial(CellModule, MinGRU),
    "fastweights": partial(CellModule, FastWeights),
    "mingru": partial(MinGRUModule, conv_width=3),
    "minlstm": MinLSTMModule,
    "lru": LRUModule,
    "s5": S5Module,
    "rglru": RGLRUModule,
    "ffm": FFMModule,
    "gtrxl": partial(GTrXLModule, window=4),
    "mlstm": MLSTMModule,
    "mamba2": partial(Mamba2Module, state_size=4),
    "gated_deltanet": GatedDeltaNetModule,
    "slstm": partial(SLSTMModule, heads=2, conv_width=3),
    "shm": partial(SHMModule, memory_size=16, rows=3),
}
TYPICAL = {"lstm", "own_mingru", "mingru", "lru"}  # with two states, a cell's step in Python, a window, complex numbers
SERVED = [("lstm", "pad"), ("gru", "pad"), *((cell, "loop") for cell in CELLS)]  # with the backend to use


def each_cell(*others: Sequence[object]) -> list[object]:
    """Return the cells, paired with other values, as parameters of a test; all but the typical ones are ``full``."""
    cases = paired(CELLS, *others) if others else [(cell,) for cell in CELLS]
    return [pytest.param(*case, marks=() if case[0] in TYPICAL else pytest.mark.full) for case in cases]


def each_served(served: Iterable[tuple[str, str]], rows: Sequence[int | None]) -> list[object]:
    """Return cells with a backend, paired with numbers of rows; loops over untypical cells are ``full``."""
    cases = paired(served, rows)
    return [
        pytest.param(
            (cell, backend), count, marks=pytest.mark.full if backend == "loop" and cell not in TYPICAL else ()
        )
        for (cell, backend), count in cases
    ]


class RandomEnds(gym.Env):
    """Environment with random observations, in which an episode ends with probability 0.1 at each step."""

    observation_space = gym.spaces.Box(-10, 10, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.normal(size=4).astype(np.float32), {}

    def step(self, action):
        return self.np_random.normal(size=4).astype(np.float32), 1.0, bool(self.np_random.random() < 0.1), False, {}


class RealActions(RandomEnds):
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)


def make_env(
    rows: int | None = 2, *transforms: object, mode: str = "DISABLED", kind: type[gym.Env] = RandomEnds
) -> EnvBase:
    if rows is None:
        env: EnvBase = GymWrapper(kind())
    else:
        mode = gym.vector.AutoresetMode[mode]
        env = GymWrapper(gym.vector.SyncVectorEnv([kind] * rows, autoreset_mode=mode))
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


def linear(inputs: int = 8, key: str = "features") -> Mod:
    return Mod(nn.Linear(inputs, 2), [key], ["logits"])


def memory(cell: str = "gru", key: str = "observation", inputs: int = 4) -> nn.Module:
    return CELLS[cell](inputs, 8, in_key=key, out_key="features")


def actor_of(*modules: nn.Module, **options: object) -> ProbabilisticActor:
    """Return a stochastic policy of modules whose last one writes the logits."""
    options = {"distribution_class": Categorical, "return_log_prob": True, **options}
    return ProbabilisticActor(Seq(*modules), in_keys=options.pop("in_keys", ["logits"]), **options)


def critic_memory() -> GRUModule:
    return GRUModule(4, 8, in_keys=["observation", "h"], out_keys=["of_critic", ("next", "h")])


def zero(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def failures(policy: object, env: EnvBase) -> list[CheckResult]:
    return [result for result in check_wiring(policy, env, steps=20) if not result.passed]


def refused(policy: object, env: EnvBase, name: str) -> CheckResult:
    """Return the first failure, which must be of the check ``name`` and suggest a fix."""
    first = failures(policy, env)[0]
    assert first.name == name, first
    assert first.fix
    return first


def wired(policy: nn.Module, rows: int | None = 2, kind: type[gym.Env] = RandomEnds) -> EnvBase:
    return TransformedEnv(make_env(rows, kind=kind), get_env_transforms_from_module(policy))


def tracked(rows: int | None = 2) -> EnvBase:
    return make_env(rows, InitTracker())


def randomize(policy: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in policy.parameters():
            nn.init.normal_(parameter)
    return policy
