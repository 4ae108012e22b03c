"""A module for each agent in one batch equals separate batches, one for each agent, in float64."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UsageError
from recurl.data import SequenceMinibatches
from recurl.diagnostics import check_wiring
from recurl.modules import (
    GRUModule,
    LSTMModule,
    NormalParamExtractor,
    ProbabilisticActor,
    SeparateAgents,
    ValueOperator,
)
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE
from tests.envs.agents import Walkers

LOSSES = ("loss_objective", "loss_critic", "loss_entropy")
AGENTS, STEPS = 3, 12


def trunk(name: str, kind, width: int) -> TensorDictSequential:
    double = TensorDictModule(lambda x: x.double(), ["observation"], [f"{name}_in"])
    states = [f"{name}_h", f"{name}_c"] if kind is LSTMModule else [f"{name}_h"]
    reads, writes = [f"{name}_in", *states], [f"{name}_features", *(("next", state) for state in states)]
    memory = kind(2, 4, in_keys=reads, out_keys=writes)
    if name == "critic":
        return TensorDictSequential(
            double, memory, ValueOperator(nn.Linear(4, 1), in_keys=["critic_features"])
        ).double()
    head = nn.Sequential(nn.Linear(4, width), NormalParamExtractor())
    return TensorDictSequential(double, memory, TensorDictModule(head, ["actor_features"], ["loc", "scale"])).double()


def acting(module) -> ProbabilisticActor:
    return ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=torch.distributions.Normal, return_log_prob=True
    )


def grads(module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).norm() <= 1e-12 * wanted.norm().clamp_min(1e-3)


def minibatch(batch, length):
    return batch if length is None else next(iter(SequenceMinibatches(batch, 1, length)))


@pytest.mark.slow
def test_independent_learners_in_one_batch():
    torch.manual_seed(0)
    policies = [trunk("actor", LSTMModule, 4) for _ in range(AGENTS)]
    critics = [trunk("critic", GRUModule, 1) for _ in range(AGENTS)]
    actor, critic = acting(SeparateAgents(policies)), SeparateAgents(critics)
    env = Walkers(limits=[11, 7], agent_ids=True)
    collector = Collector(env, TensorDictSequential(critic, actor), frames_per_batch=env.batch_size.numel() * STEPS)
    first, second = (batch for batch, _ in zip(collector, range(2), strict=False))  # the second begins inside episodes
    for batch in (first, second):
        batch = GAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch)
        loss, mask = ClipPPOLoss(actor, critic), batch["collector", "mask"]
        for cut in (None, STEPS, 4):
            actor.zero_grad(), critic.zero_grad()
            found = loss(minibatch(batch, cut))
            assert (found["max_ratio"] - 1).abs() < 1e-12
            sum(found[name] for name in LOSSES).backward()
            total = torch.zeros((), dtype=torch.float64)
            for agent in range(AGENTS):
                rows = batch[agent::AGENTS].exclude("advantage", "value_target")
                policy, values = copy.deepcopy(policies[agent]), copy.deepcopy(critics[agent])
                policy.zero_grad(), values.zero_grad()
                rows = GAE(gamma=0.9, lmbda=0.8, value_network=values)(rows)
                close(batch["advantage"][agent::AGENTS], rows["advantage"])
                losses = ClipPPOLoss(acting(policy), values)(minibatch(rows, cut))
                part = sum(losses[name] for name in LOSSES) * (mask[agent::AGENTS].double().sum() / mask.sum())
                part.backward()
                total += part.detach()
                close(grads(policies[agent]), grads(policy))
                close(grads(critics[agent]), grads(values))
            close(sum(found[name] for name in LOSSES).detach(), total)


@pytest.mark.slow
def test_the_doctor_finds_nothing():
    actor = acting(SeparateAgents([trunk("actor", GRUModule, 4) for _ in range(AGENTS)]))
    found = check_wiring(actor, Walkers(agent_ids=True), auto_register_policy_transforms=True)
    assert {"feedback", "memory", "replay", "gradient"} <= {result.name for result in found}
    assert [result for result in found if not result.passed] == []


def test_copies_and_states():
    modules = SeparateAgents([GRUModule(2, 3, in_key="observation", out_key="features") for _ in range(2)])
    batch = TensorDict(
        {"observation": torch.randn(4, 2), "agent_id": torch.eye(2).repeat(2, 1), "is_init": torch.ones(4, 1) > 0}, [4]
    )
    wanted = modules(batch.clone())
    for other in (copy.deepcopy(modules), pickle.loads(pickle.dumps(modules))):
        assert torch.equal(other(batch.clone())["features"], wanted["features"])
    fresh = SeparateAgents([GRUModule(2, 3, in_key="observation", out_key="features") for _ in range(2)])
    fresh.load_state_dict(modules.state_dict())
    assert torch.equal(fresh(batch.clone())["next", "recurrent_state"], wanted["next", "recurrent_state"])
    only = modules(batch[::2].clone())  # of the first agent
    assert torch.allclose(only["features"], wanted["features"][::2])


def linear(reads="observation", writes="x"):
    return TensorDictModule(nn.Linear(2, 1), [reads], [writes])


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: SeparateAgents([]), ArgumentError, "needs a module for each agent, got none"),
        (lambda: SeparateAgents([nn.Linear(2, 1)]), ArgumentTypeError, "takes TensorDict modules, got Linear"),
        (lambda: SeparateAgents([linear(), linear("y")]), ArgumentError, "must have the same in_keys"),
        (lambda: SeparateAgents([linear(), linear(writes="y")]), ArgumentError, "must have the same out_keys"),
        (
            lambda: SeparateAgents([linear()])(TensorDict({"observation": torch.ones(1, 2)}, [1])),
            MissingKeyError,
            "create the environment with agent_ids=True",
        ),
        (
            lambda: SeparateAgents([linear()])(
                TensorDict({"observation": torch.ones(1, 2), "agent_id": torch.ones(1, 2)}, [1])
            ),
            ArgumentError,
            r"one-hot for 1 agents, \[1, 1\], got \[1, 2\]",
        ),
    ],
)
def test_refusals(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_states_stored_at_starts_only_are_refused():
    policies = [trunk("actor", LSTMModule, 4) for _ in range(AGENTS)]
    actor = acting(SeparateAgents(policies))
    collector = Collector(Walkers(agent_ids=True), actor, frames_per_batch=6 * 8, sequence_length=4)
    batch = next(iter(collector))
    critic = TensorDictModule(nn.Linear(2, 1), ["observation"], ["state_value"])
    batch["advantage"] = batch["value_target"] = torch.ones(6, 8, 1)
    with pytest.raises(UsageError, match="SeparateAgents needs the states of all steps"):
        ClipPPOLoss(actor, critic)(batch)


def test_modules_of_one_agent_may_not_share_states():
    twice = TensorDictSequential(trunk("actor", LSTMModule, 4), trunk("actor", LSTMModule, 4))
    with pytest.raises(ArgumentError, match="must not share state keys"):
        ClipPPOLoss(acting(SeparateAgents([twice, twice, twice])), linear(writes="state_value"))(TensorDict({}, [1]))
