"""Manual collection: modules stepped through random episodes, and the same episodes as plain lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictSequential

from recurl.modules import GRUModule, LSTMModule
from recurl.modules.actors import ActorValueOperator, ProbabilisticActor, ValueOperator
from recurl.modules.distributions import Categorical, NormalParamExtractor, OneHotCategorical, TanhNormal
from recurl.modules.networks import MLP

OBS, HIDDEN, ACTIONS = 3, 5, 2


@dataclass
class Agent:
    """Agent whose ``step`` writes action, value and states; actor and critic are its parts."""

    step: TensorDictSequential
    actor: TensorDictSequential
    critic: TensorDictSequential
    states: dict[str, tuple[int, int]]


def recurrent(cell: str, prefix: str, out: str, backend: str) -> LSTMModule | GRUModule:
    names = {"lstm": ["h", "c"], "gru": ["h"]}[cell]
    states = [f"{prefix}_{name}" for name in names]
    module = {"lstm": LSTMModule, "gru": GRUModule}[cell]
    return module(
        OBS,
        HIDDEN,
        num_layers=2,
        in_keys=["observation", *states],
        out_keys=[out, *(("next", state) for state in states)],
        recurrent_backend=backend,
    )


def actor_head(kind: str, feature: str, features: int) -> ProbabilisticActor:
    if kind == "tanh":
        net = torch.nn.Sequential(MLP(features, 2 * ACTIONS), NormalParamExtractor())
        keys, distribution = ["loc", "scale"], TanhNormal
    else:
        net, keys = MLP(features, ACTIONS), ["logits"]
        distribution = {"categorical": Categorical, "one_hot": OneHotCategorical}[kind]
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=[feature], out_keys=keys),
        in_keys=keys,
        distribution_class=distribution,
        return_log_prob=True,
        default_interaction_type="random",
    )


def make_agent(cell: str, shared: bool, backend: str = "pad", kind: str = "categorical") -> Agent:
    """Return a recurrent agent (``cell`` "lstm" or "gru"), or a feed-forward one ("none")."""
    if cell == "none":
        trunk = TensorDictModule(MLP(OBS, HIDDEN), in_keys=["observation"], out_keys=["features"])
        trunks = [trunk, trunk]
    elif shared:
        trunks = [recurrent(cell, "a", "features", backend)] * 2
    else:
        trunks = [recurrent(cell, "a", "features", backend), recurrent(cell, "v", "value_features", backend)]
    value_head = ValueOperator(MLP(HIDDEN, 1, num_cells=[4]), in_keys=[trunks[1].out_keys[0]])
    head = actor_head(kind, "features", HIDDEN)
    if trunks[0] is trunks[1]:
        both = ActorValueOperator(trunks[0], head, value_head)
        agent = Agent(both, both.get_policy_operator(), both.get_value_operator(), {})
    else:
        actor = ProbabilisticTensorDictSequential(trunks[0], *head.module)
        critic = TensorDictSequential(trunks[1], value_head)
        agent = Agent(TensorDictSequential(actor, critic), actor, critic, {})
    for trunk in dict.fromkeys(trunks):
        for key in trunk.in_keys[1:-1] if cell != "none" else []:
            agent.states[key] = (2, HIDDEN)
    return agent


@torch.no_grad()
def collect(
    agent: Agent, rows: int, steps: int, batches: int, *, end: float = 0.2, dtype: torch.dtype = torch.float64
) -> list[TensorDict]:
    """Step the agent through random episodes: ``batches`` consecutive batches ``[rows, steps]``."""
    root = TensorDict({"observation": torch.randn(rows, OBS, dtype=dtype)}, [rows])
    root["is_init"] = torch.ones(rows, 1, dtype=torch.bool)
    traj_ids, fresh = torch.arange(rows), rows
    for key, shape in agent.states.items():
        root[key] = torch.zeros(rows, *shape, dtype=dtype)
    frames = []
    for _ in range(steps * batches):
        frame = agent.step(root.clone())
        terminated, truncated = torch.rand(2, rows, 1) < end / 2
        done = terminated | truncated
        after = frame.get("next", TensorDict({}, [rows]))
        after["observation"] = torch.randn(rows, OBS, dtype=dtype)
        after["reward"] = torch.randn(rows, 1)
        after["done"], after["terminated"], after["truncated"] = done, terminated, truncated
        frame["next"] = after
        frame["collector"] = TensorDict({"traj_ids": traj_ids.clone()}, [rows])
        frames.append(frame)
        root = TensorDict({"is_init": done.clone()}, [rows])
        root["observation"] = torch.where(done, torch.randn(rows, OBS, dtype=dtype), after["observation"])
        for key in agent.states:
            root[key] = after[key].masked_fill(done.unsqueeze(-1), 0.0)
        count = int(done.sum())
        traj_ids[done.squeeze(-1)] = torch.arange(fresh, fresh + count)
        fresh += count
    return [torch.stack(frames[i : i + steps], 1) for i in range(0, steps * batches, steps)]
