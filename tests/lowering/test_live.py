"""What holds modules sees them as they are: copies compute with their own weights, edits count at the next call."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn.utils import parametrize

from recurl.collectors import Collector
from recurl.data import BurnIn, ZeroStart
from recurl.envs import GymEnv
from recurl.errors import ArgumentError, UnsupportedError
from recurl.lowering import Entries, Network, network
from recurl.modules import MLP, QValueActor, ValueOperator
from recurl.objectives import ClipPPOLoss, DQNLoss, HardUpdate, SoftUpdate
from recurl.objectives.value import GAE
from recurl.trainers import PPO, PPOConfig
from recurl.trainers.networks.agent import collecting
from tests.objectives.simulate import ACTIONS, HIDDEN, OBS, Agent, collect, make_agent, recurrent

Call = Callable[[Any, TensorDict], dict[str, torch.Tensor]]


def losses_of(loss: Any, batch: TensorDict) -> dict[str, torch.Tensor]:
    return dict(loss(batch.clone()).items())


def advantages_of(gae: Any, batch: TensorDict) -> dict[str, torch.Tensor]:
    out = gae(batch.exclude("advantage", "value_target", "state_value"))
    return {key: out[key] for key in ("advantage", "value_target", "state_value")}


def actions_of(policy: Any, batch: TensorDict) -> dict[str, torch.Tensor]:
    run, program = batch[:, 0].exclude("action", "next", "logits"), Network([policy])
    out = program(Entries.of(run) if program.why_not_lowered() is None else run)
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
    """An object with modules inside, how to call it, and a batch for it."""
    agent, batch = prepared(cell, kind != "separate", backend)
    if kind == "gae":
        return GAE(gamma=0.9, lmbda=0.8, value_network=agent.critic, differentiable=True), advantages_of, batch
    if kind == "policy":
        return agent.actor, actions_of, batch
    if kind == "dqn":
        batch["action"] = torch.randint(ACTIONS, (4, 12))
        return DQNLoss(q_network(cell, backend), gamma=0.9, double_dqn=True), losses_of, batch
    return ClipPPOLoss(agent.actor, agent.critic), losses_of, batch


KINDS = ["shared", "separate", "dqn", "gae", "policy"]
CASES = [(kind, cell) for kind in KINDS for cell in ("lstm", "gru", "none")]


def plain(call: Call, thing: Any, batch: TensorDict, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """What module by module on TensorDicts gives."""
    with monkeypatch.context() as patch:
        patch.setattr(network, "links_of", lambda modules: "a test says so")
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


@pytest.mark.slow
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize(("kind", "cell"), CASES)
def test_a_copy_computes_with_its_own_weights(
    kind: str, cell: str, duplicate: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    thing, call, batch = subject(kind, cell)
    before = call(thing, batch)  # something may be kept from a first call
    twin = duplicate(thing)
    assert_same(call(twin, batch), before)
    trained = [p for p in twin.parameters() if p.requires_grad]
    assert {id(p) for p in trained}.isdisjoint(map(id, thing.parameters()))
    optimizer = torch.optim.Adam(trained, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        total(call(twin, batch)).backward()
        optimizer.step()
    assert all(p.grad is not None for p in trained if kind != "gae" or "critic" in kind)
    assert all(p.grad is None for p in thing.parameters())
    assert_same(call(thing, batch), before)
    after = call(twin, batch)
    assert any(not torch.equal(after[key], before[key]) for key in before)
    assert_same(after, plain(call, twin, batch, monkeypatch))


@pytest.mark.parametrize("kind", KINDS)
def test_moved_and_edited_weights_count(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thing, call, batch = subject(kind)
    other, _, _ = subject(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    before = call(thing, batch)
    thing.load_state_dict(other.state_dict())
    assert_same(call(thing, batch), call(other, batch))
    thing.share_memory()
    assert_same(call(thing, batch), call(other, batch))
    assert any(not torch.equal(value, before[key]) for key, value in call(thing, batch).items())
    doubled = batch.apply(lambda value: value.double() if value.is_floating_point() else value)
    thing.double()
    assert_same(call(thing, doubled), plain(call, thing, doubled, monkeypatch))


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("kind", KINDS)
def test_parametrized_weights_count(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thing, call, batch = subject(kind)
    other = copy.deepcopy(thing)
    call(thing, batch)
    owners = [(m, n) for m in thing.modules() for n, p in m.named_parameters(recurse=False) if "weight" in n]
    for owner, name in owners:
        parametrize.register_parametrization(owner, name, Twice())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "weight" in name:
                parameter.mul_(2)
    result = call(thing, batch)
    assert_same(result, call(other, batch))
    assert_same(result, plain(call, thing, batch, monkeypatch))
    total(result).backward()
    assert any(p.grad is not None and "original" in name for name, p in thing.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_functional_call(kind: str) -> None:
    thing, call, batch = subject(kind)
    other, _, _ = subject(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    before = call(thing, batch)
    state = {name: value.detach().clone() for name, value in other.named_parameters()}
    wrapped = _Called(thing, call)
    # With tie_weights torch doesn't put back the weights of a module that the tree holds twice.
    names = {f"thing.{name}": value for name, value in state.items()}
    found = functional_call(wrapped, names, (batch,), tie_weights=False)
    assert_same(found, call(other, batch))
    assert_same(call(thing, batch), before)


class _Called(nn.Module):
    """``call(thing, batch)`` as a module, for torch.func."""

    def __init__(self, thing: nn.Module, call: Call) -> None:
        super().__init__()
        self.thing, self._call = thing, call

    def forward(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        return self._call(self.thing, batch)


def ensemble(kind: str, cell: str, backend: str) -> tuple[list[Any], Call, TensorDict]:
    """Three members with different weights."""
    thing, call, batch = subject(kind, cell, backend)
    members = [copy.deepcopy(thing) for _ in range(3)]
    with torch.no_grad():
        for index, member in enumerate(members):
            for parameter in member.parameters():
                parameter.mul_(1.0 + 0.2 * index)
    return members, call, batch


def objective(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum(value.sum() for key, value in out.items() if key.startswith(("loss", "adv", "logits")))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "loop", "scan", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_an_ensemble_under_vmap(kind: str, cell: str, backend: str) -> None:
    """torch.func's idiom: members' parameters stacked, a copy without memory of its own called under vmap."""
    members, call, batch = ensemble(kind, cell, backend)
    base = _Called(copy.deepcopy(members[0]).to("meta"), call)
    params, buffers = stack_module_state([_Called(member, call) for member in members])
    targets = {name: params.pop(name) for name in list(params) if "target" in name}

    def one(params: Any, targets: Any, buffers: Any) -> dict[str, torch.Tensor]:
        return functional_call(base, {**params, **targets, **buffers}, (batch,))

    found = torch.vmap(one, randomness="different")(params, targets, buffers)
    grads = torch.vmap(torch.func.grad(lambda *state: objective(one(*state))), randomness="different")(
        params, targets, buffers
    )
    for index, member in enumerate(members):
        out = call(member, batch)
        for key, value in out.items():
            torch.testing.assert_close(found[key][index], value, rtol=1e-4, atol=1e-5)
        objective(out).backward()
        for name, parameter in member.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(grads[f"thing.{name}"][index], parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_pad_refuses_an_ensemble(cell: str) -> None:
    thing, call, batch = subject("shared", cell, "pad")
    params, _ = stack_module_state([thing, copy.deepcopy(thing)])

    def one(params: dict[str, torch.Tensor]) -> torch.Tensor:
        state = {f"thing.{name}": value for name, value in params.items()}
        return functional_call(_Called(thing, call), state, (batch,))["loss_critic"]

    with pytest.raises(UnsupportedError, match=r"can't transform.*use recurrent_backend='loop'"):
        torch.vmap(one)(params)


# -- edits of the module tree


def networks_of(thing: Any) -> dict[str, nn.Module]:
    return {name: module for name, module in thing.named_children() if not name.startswith("target")}


@pytest.mark.parametrize("kind", ["shared", "separate", "dqn", "gae"])
def test_an_assigned_network_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thing, call, batch = subject(kind)
    before = call(thing, batch)
    new = copy.deepcopy(networks_of(thing))  # together: a trunk that both have stays shared
    for name, module in new.items():
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.5)
        setattr(thing, name, module)
    after = call(thing, batch)
    assert any(not torch.equal(after[key], before[key]) for key in before)
    assert_same(after, plain(call, thing, batch, monkeypatch))
    total(after).backward()
    assert all(parameter.grad is not None for new in networks_of(thing).values() for parameter in new.parameters())


def replaceable(thing: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters, targets' excepted."""
    inside = {id(module) for module in getattr(thing, "target_value_network", nn.Module()).modules()}
    found = [module for module in thing.modules() if module is not thing and id(module) not in inside]
    return [module for module in found if any(True for _ in module.parameters())]


def replace(thing: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever the tree holds ``old``."""
    for parent in list(thing.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_replaced_anywhere_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thing, call, batch = subject(kind)
    olds = [module for module in replaceable(thing) if kind != "shared" or not _holds_shared(thing, module)]
    assert len(olds) >= 5
    for old in olds:
        before = call(thing, batch)
        new = copy.deepcopy(old)
        with torch.no_grad():
            for parameter in new.parameters():
                parameter.mul_(1.5)
        replace(thing, old, new)
        after = call(thing, batch)
        assert any(not torch.equal(after[key], before[key]) for key in before), type(old)
        assert_same(after, plain(call, thing, batch, monkeypatch))
        replace(thing, new, old)


def _holds_shared(thing: nn.Module, module: nn.Module) -> bool:
    """Whether ``module`` holds the trunk beside other things, so that its copy would have a trunk of its own."""
    trunk = thing.actor_network.module[0]
    return module is not trunk and any(child is trunk for child in module.modules())


def test_a_trunk_that_is_no_longer_shared_is_refused() -> None:
    thing, call, batch = subject("shared")
    thing.critic_network = copy.deepcopy(thing.critic_network)
    with pytest.raises(ArgumentError, match="each has a recurrent module with the state 'a_"):
        call(thing, batch)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_count_from_the_next_call_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thing, call, batch = subject(kind)
    call(thing, batch)
    own = [
        module
        for name, module in thing.named_modules()
        if name and "target" not in name and not isinstance(module, nn.ModuleList) and not hasattr(module, "evaluate")
    ]
    for module in own:
        calls: list[str] = []
        handles = [
            module.register_forward_hook(lambda *_, calls=calls: calls.append("after")),
            module.register_forward_pre_hook(lambda *_, calls=calls: calls.append("before")),
        ]
        call(thing, batch)
        lowered, calls[:] = list(calls), []
        plain(call, thing, batch, monkeypatch)
        assert lowered == calls, type(module)
        for handle in handles:
            handle.remove()
        calls.clear()
        call(thing, batch)
        assert calls == []
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    call(thing, batch)
    handle.remove()
    assert "TensorDictModule" in calls or "ValueOperator" in calls


def test_backward_hooks_of_tensordict_modules_count() -> None:
    thing = subject("shared")[0]
    assert thing.why_not_lowered() is None
    handle = thing.critic_network.module[-1].register_full_backward_hook(lambda *_: None)
    assert thing.why_not_lowered() == "ValueOperator has hooks"
    handle.remove()
    assert thing.why_not_lowered() is None


def test_a_module_that_comes_twice_runs_twice() -> None:
    again = TensorDictModule(nn.Linear(OBS, OBS), in_keys=["observation"], out_keys=["observation"])
    value = ValueOperator(MLP(OBS, 1), in_keys=["observation"])
    critic = TensorDictSequential(again, again, value)
    x = torch.randn(3, OBS)
    run = TensorDict({"observation": x}, [3])
    expected = value.module(again.module(again.module(x)))
    assert torch.equal(Network([critic])(Entries.of(run.copy()))["state_value"], expected)
    assert torch.equal(critic(run.copy())["state_value"], expected)


def test_a_collector_sees_edits_at_its_next_batch() -> None:
    env = GymEnv("recurl/MaskedCartPole-v1", num_envs=2, categorical_action_encoding=True)
    config = PPOConfig(env="recurl/MaskedCartPole-v1", hidden_size=8)
    agent = PPO.make_agent(config, env.observation_spec, env.action_spec_unbatched)
    collector = Collector(env, collecting(agent.policy), frames_per_batch=32)
    collector.collect()
    assert collector.why_not_lowered() is None
    head = agent.actor.module[0].module[-1]
    with torch.no_grad():
        new = nn.Linear(8, 2)
        new.weight.zero_(), new.bias.copy_(torch.tensor([100.0, -100.0]))
    head.module = new
    batch = collector.collect()
    assert batch["action"].eq(0).all()
    calls: list[int] = []
    handle = agent.actor.register_forward_hook(lambda *_: calls.append(1))
    collector.collect()
    assert len(calls) == 16
    assert collector.why_not_lowered() == "ProbabilisticActor has hooks"
    handle.remove()
    assert collector.why_not_lowered() is None


def test_the_same_rules_in_collecting_and_learning() -> None:
    """``inplace`` None and True are the same to both; another forward stops both."""
    for inplace in (None, True):
        critic = TensorDictSequential(ValueOperator(MLP(OBS, 1)), inplace=inplace)
        assert GAE(gamma=0.9, lmbda=0.8, value_network=critic).why_not_lowered() is None
        assert Network([critic]).why_not_lowered() is None

    class Own(QValueActor):
        def forward(self, tensordict: TensorDict) -> TensorDict:
            return super().forward(tensordict)

    actor = Own(MLP(OBS, ACTIONS), action_space="categorical")
    assert DQNLoss(actor).why_not_lowered() == Network([actor]).why_not_lowered() is not None


# -- what else captures modules


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_copied_updaters_move_the_copied_targets(duplicate: Callable[[Any], Any]) -> None:
    loss, _, _ = subject("dqn")
    for updater in (HardUpdate(loss, value_network_update_interval=1), SoftUpdate(loss, tau=0.5)):
        twin_loss, twin = duplicate((loss, updater))
        before = {name: value.clone() for name, value in loss.state_dict().items()}
        with torch.no_grad():
            for parameter in twin_loss.value_network.parameters():
                parameter.add_(1.0)
        twin.step()
        changed = [
            not torch.equal(value, before[name]) for name, value in twin_loss.state_dict().items() if "target" in name
        ]
        assert all(changed)
        assert_same(dict(loss.state_dict()), before)


def test_updaters_see_an_assigned_network() -> None:
    loss, _, _ = subject("dqn")
    update = HardUpdate(loss, value_network_update_interval=1)
    loss.value_network = copy.deepcopy(loss.value_network)
    with torch.no_grad():
        for parameter in loss.value_network.parameters():
            parameter.add_(1.0)
    update.step()
    pairs = zip(loss.value_network.parameters(), loss.target_value_network.parameters(), strict=True)
    assert all(torch.equal(online, target) for online, target in pairs)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, None])
def test_burn_in_runs_the_policy_as_it_is(duplicate: Callable[[Any], Any] | None) -> None:
    agent, batch = prepared("gru", True, "loop")
    sample = batch.reshape(-1)
    burn_in = BurnIn(agent.actor, 3)
    before = burn_in(sample)["a_h"]
    if duplicate is not None:
        burn_in = duplicate(burn_in)
        assert torch.equal(burn_in(sample)["a_h"], before)
    policy = burn_in.policy
    memory = next(module for module in policy.modules() if hasattr(module, "make_tensordict_primer"))
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.mul_(2)
    expected = BurnIn(policy, 3)(sample)["a_h"]
    assert torch.equal(burn_in(sample)["a_h"], expected)
    assert not torch.equal(expected, before)
    policy.module[0] = recurrent("gru", "b", "features", "loop")
    assert "b_h" in burn_in(sample.set("b_h", sample["a_h"])).keys()  # noqa: SIM118 - a TensorDict has no `in`
    assert ZeroStart(policy)(sample)["b_h"][sample["is_init"].squeeze(-1)].eq(0).all()
