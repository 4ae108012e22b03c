"""Objects that hold modules, with calls and batches for them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.execution import NotCompiled
from recurl.execution.lowering import Entries, Network, network
from recurl.modules import MLP, QValueActor
from recurl.objectives import ClipPPOLoss, DQNLoss
from recurl.objectives.value import GAE
from tests.objectives.replay_losses import KINDS as REPLAY_KINDS
from tests.objectives.replay_losses import make_replay_loss
from tests.objectives.simulate import ACTIONS, HIDDEN, OBS, Agent, collect, make_agent, recurrent

Call = Callable[[Any, TensorDict], dict[str, torch.Tensor]]


def losses_of(loss: Any, batch: TensorDict) -> dict[str, torch.Tensor]:
    return dict(loss(batch.clone()).items())


def advantages_of(gae: Any, batch: TensorDict) -> dict[str, torch.Tensor]:
    out = gae(batch.exclude("advantage", "value_target", "state_value"))
    return {key: out[key] for key in ("advantage", "value_target", "state_value")}


def actions_of(policy: Any, batch: TensorDict) -> dict[str, torch.Tensor]:
    run, program = batch[:, 0].exclude("action", "next", "logits"), Network([policy])
    out = program(Entries.of(run) if program.obstacle is None else run)
    return {"logits": out["logits"]}


def q_network(cell: str, backend: str) -> QValueActor:
    memory = [recurrent(cell, "a", "features", backend)] if cell != "none" else []
    head = TensorDictModule(
        MLP(HIDDEN if memory else OBS, ACTIONS, num_cells=[4]),
        in_keys=["features" if memory else "observation"],
        out_keys=["action_value"],
    )
    return QValueActor(TensorDictSequential(*memory, head), action_space="categorical")


def prepared(cell: str, shared: bool, backend: str) -> tuple[Agent, TensorDict]:
    torch.manual_seed(0)
    agent = make_agent(cell, shared, backend)
    agent.step.float()
    batch = collect(agent, 4, 12, 2, dtype=torch.float32)[1]
    GAE(gamma=0.9, lmbda=0.8, value_network=agent.critic)(batch)
    batch["action_log_prob"] = batch["action_log_prob"] + torch.linspace(-0.5, 0.5, 48).reshape(4, 12)
    return agent, batch


def subject(kind: str, cell: str = "lstm", backend: str = "loop") -> tuple[Any, Call, TensorDict]:
    """Return an object that holds modules, a function that calls it, and a batch for it."""
    agent, batch = prepared(cell, kind != "separate", backend)
    if kind == "gae":
        return GAE(gamma=0.9, lmbda=0.8, value_network=agent.critic, differentiable=True), advantages_of, batch
    if kind == "policy":
        return agent.actor, actions_of, batch
    if kind == "dqn":
        batch["action"] = torch.randint(ACTIONS, (4, 12))
        return DQNLoss(q_network(cell, backend), gamma=0.9, double_dqn=True), losses_of, batch
    if kind in REPLAY_KINDS:
        torch.manual_seed(0)
        loss, other = make_replay_loss(kind, cell, "own", backend)
        return loss, losses_of, collect(other, 4, 12, 2, dtype=torch.float32)[1]
    return ClipPPOLoss(agent.actor, agent.critic), losses_of, batch


KINDS = ["shared", "separate", "dqn", *REPLAY_KINDS, "gae", "policy"]


CASES = [(kind, cell) for kind in KINDS for cell in ("lstm", "gru", "none")]


def not_lowered(modules: Any) -> None:
    raise NotCompiled("a test says so")


def plain(call: Call, thing: Any, batch: TensorDict, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Return the results of running module by module on TensorDicts."""
    with monkeypatch.context() as patch:
        patch.setattr(network, "Links", not_lowered)
        return call(thing, batch)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


def total(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum(value.sum() for value in out.values() if value.requires_grad)


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
