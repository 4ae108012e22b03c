"""Recurrent policies, and batches collected with them."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl.collectors import Collector
from recurl.envs import GymEnv, InitTracker, TransformedEnv
from recurl.modules import (
    Categorical,
    FFMModule,
    GRUModule,
    LRUModule,
    LSTMModule,
    ProbabilisticActor,
    ValueOperator,
)

CELLS = {"lstm": (LSTMModule, ("h", "c")), "gru": (GRUModule, ("h",))}
PAIRED: dict[str, tuple[type, tuple[str, ...]]] = {"lru": (LRUModule, ("h",)), "ffm": (FFMModule, ("h",))}
"""Cells whose states are complex numbers stored as pairs."""


Policy = tuple[ProbabilisticActor, TensorDictSequential, TensorDictSequential]


def make_env(rows: int | None = 3) -> TransformedEnv:
    env = GymEnv("recurl/MaskedCartPole-v1", num_envs=rows, categorical_action_encoding=True)
    env.set_seed(1)
    return TransformedEnv(env, InitTracker())


def memory(cell: str, prefix: str, backend: str) -> LSTMModule | GRUModule:
    kind, names = (CELLS | PAIRED)[cell]
    states = [f"{prefix}_{name}" for name in names]
    return kind(
        2,
        6,
        in_keys=["observation", *states],
        out_keys=[f"{prefix}_features", *(("next", state) for state in states)],
        recurrent_backend=backend,
    )


def make_policy(cell: str = "gru", backend: str = "loop") -> Policy:
    """Actor, critic with its own memory, and both combined, with weights that make results depend on states."""
    torch.manual_seed(0)
    head = TensorDictModule(nn.Linear(6, 2), ["a_features"], ["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(memory(cell, "a", backend), head),
        ["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
        default_interaction_type="random",
    )
    critic = TensorDictSequential(memory(cell, "v", backend), ValueOperator(nn.Linear(6, 1), ["v_features"]))
    with torch.no_grad():
        for parameter in [*actor.parameters(), *critic.parameters()]:
            parameter.mul_(3.0)
    return actor, critic, TensorDictSequential(critic, actor)


def collected(policy: Policy, batches: int = 2, steps: int = 40, rows: int | None = 3) -> list[TensorDict]:
    collector = Collector(make_env(rows), policy[2], frames_per_batch=steps * (rows or 1))
    return [collector.collect() for _ in range(batches)]
