"""Groups of agents with nested keys in TorchRL programs: each agent's memory, and PPO, equal those of single rows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torchrl.modules
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import InitTracker, TransformedEnv
from torchrl.envs.libs.vmas import VmasEnv
from torchrl.modules import ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss

import recurl
import recurl.modules as rm
import recurl.objectives as ro
from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from recurl.data import agents_as_rows
from recurl.modules import AgentsAsRows, GRUModule, LSTMModule, SeparateAgents, set_recurrent_mode
from recurl.modules.interop import for_torchrl

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ENVS, AGENTS, STEPS = 4, 3, 20


def network(width: int, out: list[str]) -> TensorDictSequential:
    memory = LSTMModule(16, 8, in_key="observation", out_key=f"features{width}")
    if width == 1:
        memory = GRUModule(16, 8, in_keys=["observation", "vs"], out_keys=["features1", ("next", "vs")])
    head = nn.Linear(8, width) if width == 1 else nn.Sequential(nn.Linear(8, width), rm.NormalParamExtractor())
    return TensorDictSequential(memory, TensorDictModule(head, [f"features{width}"], out))


def collect(policy: AgentsAsRows) -> tuple[Any, TensorDict]:
    """Return TorchRL's actor with a policy, and a batch ``[4, 20]`` that its collector has wired by itself."""
    actor = ProbabilisticActor(
        for_torchrl(policy),
        in_keys=[("agents", "loc"), ("agents", "scale")],
        out_keys=[("agents", "action")],
        distribution_class=TanhNormal,
        return_log_prob=True,
        log_prob_key=("agents", "action_log_prob"),
    )
    base = VmasEnv("balance", num_envs=ENVS, max_steps=7, n_agents=AGENTS, seed=0)
    collector = Collector(
        TransformedEnv(base, InitTracker()), actor, frames_per_batch=ENVS * STEPS, auto_register_policy_transforms=True
    )
    batch = next(iter(collector))
    collector.shutdown()
    return actor, batch


def alone(module: Any, batch: TensorDict, env: int, agent: int) -> torch.Tensor:
    """Return ``loc`` of an agent, step by step, with zero states where an episode begins."""
    found, states = [], {}
    for t in range(STEPS):
        is_init = batch["is_init"][env, t].reshape(1, 1)
        step = TensorDict({"observation": batch["agents", "observation"][env, t, agent][None], "is_init": is_init}, [1])
        if not is_init.item():
            step.update(states)
        step = module(step)
        found.append(step["loc"][0])
        states = step["next"]
    return torch.stack(found)


@pytest.fixture(scope="module")
def collected():
    torch.manual_seed(0)
    policy = AgentsAsRows(network(4, ["loc", "scale"]), AGENTS)
    with torch.no_grad():
        return policy, *collect(policy)


def test_each_agent_has_its_own_memory(collected):
    policy, _, batch = collected
    assert batch["agents", "recurrent_state_h"].shape == (ENVS, STEPS, AGENTS, 1, 8)
    with torch.no_grad(), set_recurrent_mode(True):
        replayed = policy(batch.copy())["agents", "loc"]
    torch.testing.assert_close(replayed, batch["agents", "loc"], rtol=1e-5, atol=1e-6)
    for env, agent in ((0, 0), (1, 2), (3, 1)):
        with torch.no_grad():
            wanted = alone(policy.module, batch, env, agent)
        torch.testing.assert_close(batch["agents", "loc"][env, :, agent], wanted, rtol=1e-5, atol=1e-6)


def test_ppo_of_torchrl_on_groups_is_that_of_recurl_on_rows(collected):
    policy, actor, batch = collected
    critic = network(1, ["state_value"])
    grouped = AgentsAsRows(critic, AGENTS)
    advantage = torch.randn(ENVS, STEPS, AGENTS, 1)
    batch = batch.copy()
    batch["agents", "advantage"] = advantage
    batch["agents", "value_target"] = torch.randn_like(advantage)
    options = {"normalize_advantage": False, "entropy_bonus": False}
    theirs = ClipPPOLoss(actor, grouped, **options)
    theirs.set_keys(
        action=("agents", "action"),
        sample_log_prob=("agents", "action_log_prob"),
        value=("agents", "state_value"),
        advantage=("agents", "advantage"),
        value_target=("agents", "value_target"),
    )
    rows = agents_as_rows(batch, time=True)
    own = rm.ProbabilisticActor(
        copy.deepcopy(policy.module), ["loc", "scale"], distribution_class=rm.TanhNormal, return_log_prob=True
    )
    ours = ro.ClipPPOLoss(own, copy.deepcopy(critic), **options)
    found = theirs(batch)
    wanted = ours(rows)
    for name in ("loss_objective", "loss_critic"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)
        a = torch.autograd.grad(found[name], theirs.parameters(), allow_unused=True, retain_graph=True)
        b = torch.autograd.grad(wanted[name], ours.parameters(), allow_unused=True, retain_graph=True)
        a, b = ([one for one in each if one is not None] for each in (a, b))
        assert len(a) == len(b) > 0
        for one, two in zip(a, b, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_agents_with_separate_weights():
    torch.manual_seed(0)
    nets = [network(4, ["loc", "scale"]) for _ in range(AGENTS)]
    with torch.no_grad():
        _, batch = collect(AgentsAsRows(SeparateAgents(nets), AGENTS))
        for agent, net in enumerate(nets):
            wanted = alone(net, batch, 2, agent)
            torch.testing.assert_close(batch["agents", "loc"][2, :, agent], wanted, rtol=1e-5, atol=1e-6)


def group(*batch: int, agents: int = AGENTS, name: str = "agents") -> TensorDict:
    made = TensorDict({"is_init": torch.zeros(*batch, 1, dtype=torch.bool)}, batch)
    return made.set(name, TensorDict({"observation": torch.randn(*batch, agents, 16)}, [*batch, agents]))


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
@pytest.mark.parametrize("recurrent", [False, True])
def test_batches_of_any_shape(batch, recurrent):
    policy = AgentsAsRows(GRUModule(16, 8, in_key="observation", out_key="features"), AGENTS, group="robots")
    given = group(*batch, name="robots")
    if recurrent and not batch:
        return
    with set_recurrent_mode(recurrent):
        found = policy(given.copy())
        for agent in range(AGENTS):
            single = TensorDict({"is_init": given["is_init"]}, batch)
            single["observation"] = given["robots", "observation"][..., agent, :]
            wanted = policy.module(single)
            torch.testing.assert_close(found["robots", "features"][..., agent, :], wanted["features"])
            state = found["next", "robots", "recurrent_state"][..., agent, :, :]
            torch.testing.assert_close(state, wanted["next", "recurrent_state"])


def test_flags_of_agents_and_entries_of_the_environment():
    module = TensorDictSequential(
        TensorDictModule(lambda x, s: torch.cat([x, s], -1), ["observation", "state"], ["both"]),
        GRUModule(18, 8, in_key="both", out_key="features"),
    )
    policy = AgentsAsRows(module, AGENTS, shared=["state"])
    assert policy.in_keys == [("agents", "observation"), "state", ("agents", "recurrent_state"), ("agents", "is_init")]
    given = group(2)
    given["state"] = torch.randn(2, 2)
    given["agents", "is_init"] = torch.tensor([[True, False, False], [False, True, False]])[..., None]
    given["agents", "recurrent_state"] = torch.randn(2, AGENTS, 1, 8)
    found = policy(given.copy())["agents", "features"]
    given["agents", "recurrent_state"] = torch.randn(2, AGENTS, 1, 8)
    again = policy(given.copy())["agents", "features"]
    same = (found == again).all(-1)
    assert torch.equal(same, given["agents", "is_init"].squeeze(-1))


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_critic_of_the_state_alone(recurrent):
    critic = GRUModule(2, 8, in_key="state", out_key="features")
    grouped = AgentsAsRows(critic, AGENTS, shared=["state", "is_init"])
    given = TensorDict({"state": torch.randn(2, 5, 2), "is_init": torch.rand(2, 5, 1) < 0.3}, [2, 5])
    with set_recurrent_mode(recurrent):
        wanted = critic(given.copy())
        found = grouped(given.copy())
    for agent in range(AGENTS):
        torch.testing.assert_close(found["agents", "features"][:, :, agent], wanted["features"])
    first = found["next", "agents", "recurrent_state"]
    assert first.shape == (2, 5, AGENTS, 1, 8)


def test_copies_and_mistakes():
    policy = AgentsAsRows(network(4, ["loc", "scale"]), AGENTS)
    given = group(2)
    wanted = policy(given.copy())["agents", "loc"]
    for copied in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert torch.equal(copied(given.copy())["agents", "loc"], wanted)
    with pytest.raises(ArgumentError, match=r"n_agents=3, but the group 'agents' has 2 agents"):
        policy(group(2, agents=2))
    with pytest.raises(MissingKeyError, match="no group of agents 'agents'"):
        policy(group(2, name="robots"))
    with pytest.raises(ArgumentTypeError, match="wrap it"):
        AgentsAsRows(nn.Linear(2, 2), AGENTS)
    theirs = TensorDictSequential(
        torchrl.modules.GRUModule(input_size=16, hidden_size=8, in_key="observation", out_key="f")
    )
    with pytest.raises(ArgumentTypeError, match=r"recurrent modules of recurl, got torchrl\..*GRUModule: use recurl"):
        AgentsAsRows(theirs, AGENTS)
    recurl.accelerate(theirs)
    assert AgentsAsRows(theirs, AGENTS)(given.copy())["agents", "f"].shape == (2, AGENTS, 8)
