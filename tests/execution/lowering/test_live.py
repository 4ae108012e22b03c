"""Objects see the modules they hold as they are: copies use their own weights, edits take effect at the next call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn.utils import parametrize

from recurl.collectors import Collector
from recurl.core.errors import ArgumentError
from recurl.data import BurnIn, ZeroStart
from recurl.envs import GymEnv
from recurl.execution.lowering import Entries, Network
from recurl.modules import MLP, QValueActor, ValueOperator
from recurl.objectives import DQNLoss, HardUpdate, SoftUpdate
from recurl.objectives.actor_critic import ActorCriticLoss
from recurl.objectives.soft_loss import SoftLoss
from recurl.objectives.value import GAE
from recurl.trainers import PPO, PPOConfig
from recurl.trainers.networks.agent import collecting
from tests.execution.lowering.live import CASES, KINDS, assert_same, pickled, plain, prepared, saved, subject, total
from tests.objectives.simulate import ACTIONS, OBS, recurrent

DUPLICATES = {"lstm": pickled, "gru": saved, "none": pickled}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cell", "duplicate"), [(*case, way) for case in CASES for way in (copy.deepcopy, DUPLICATES[case[1]])]
)
def test_a_copy_computes_with_its_own_weights(
    kind: str, cell: str, duplicate: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    thing, call, batch = subject(kind, cell)
    before = call(thing, batch)  # the first call may fill caches
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


# -- edits of the module tree


def networks_of(thing: Any) -> dict[str, nn.Module]:
    return {name: module for name, module in thing.named_children() if not name.startswith("target")}


@pytest.mark.parametrize("kind", ["shared", "separate", "dqn", "gae"])
def test_an_assigned_network_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thing, call, batch = subject(kind)
    before = call(thing, batch)
    new = copy.deepcopy(networks_of(thing))  # copied together, so that a common trunk stays shared
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
    """Return the modules with parameters, except those of target networks."""
    targets = [child for name, child in thing.named_children() if name.startswith("target")]
    inside = {id(module) for target in targets for module in target.modules()}
    found = [module for module in thing.modules() if module is not thing and id(module) not in inside]
    return [module for module in found if any(True for _ in module.parameters())]


def replace(thing: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace ``old`` by ``new`` everywhere in the tree."""
    for parent in list(thing.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


@pytest.mark.slow
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
    """Return whether ``module`` holds the trunk and other modules, so that its copy would have a separate trunk."""
    trunk = thing.actor_network.module[0]
    return module is not trunk and any(child is trunk for child in module.modules())


def test_a_trunk_that_is_no_longer_shared_is_refused() -> None:
    thing, call, batch = subject("shared")
    thing.critic_network = copy.deepcopy(thing.critic_network)
    with pytest.raises(ArgumentError, match="each has a recurrent module with the state 'a_"):
        call(thing, batch)


def _split_sequences(thing: nn.Module) -> list[nn.Module]:
    """Return the sequences of an off-policy actor-critic loss whose memory runs separately from later modules."""
    if not isinstance(thing, ActorCriticLoss):
        return []
    critics = list(thing.qvalue_network) if thing.reads_action else []
    return [*critics, *([thing.actor_network] if isinstance(thing, SoftLoss) else [])]


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
        if module in _split_sequences(thing):
            handle = module.register_forward_hook(lambda *_: None)
            with pytest.raises(ArgumentError, match=f"be split.* {type(module).__name__} has hooks"):
                call(thing, batch)
            handle.remove()
            continue
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
    assert thing.explain()["tensors"] is None
    handle = thing.critic_network.module[-1].register_full_backward_hook(lambda *_: None)
    assert thing.explain()["tensors"] == "ValueOperator has hooks"
    handle.remove()
    assert thing.explain()["tensors"] is None


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
    assert collector.explain()["tensors"] is None
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
    assert collector.explain()["tensors"] == "ProbabilisticActor has hooks"
    handle.remove()
    assert collector.explain()["tensors"] is None


def test_the_same_rules_in_collecting_and_learning() -> None:
    """``inplace`` None and True are equivalent for both; another forward prevents both."""
    for inplace in (None, True):
        critic = TensorDictSequential(ValueOperator(MLP(OBS, 1)), inplace=inplace)
        assert GAE(gamma=0.9, lmbda=0.8, value_network=critic).explain()["tensors"] is None
        assert Network([critic]).obstacle is None

    class Own(QValueActor):
        def forward(self, tensordict: TensorDict) -> TensorDict:
            return super().forward(tensordict)

    actor = Own(MLP(OBS, ACTIONS), action_space="categorical")
    assert DQNLoss(actor).explain()["tensors"] == Network([actor]).obstacle is not None


# -- other objects that capture modules


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
def test_burn_in_runs_the_current_policy(duplicate: Callable[[Any], Any] | None) -> None:
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
