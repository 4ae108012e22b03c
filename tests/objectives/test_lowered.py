"""Lowered losses are bitwise equal to losses that run module by module on TensorDicts."""

import pytest
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_skip_existing,
)

from recurl.core.errors import MissingKeyError
from recurl.data import SequenceMinibatches
from recurl.execution import NotCompiled
from recurl.execution.lowering import Entries, network
from recurl.modules import MLP, QValueActor
from recurl.objectives import A2CLoss, ClipPPOLoss, DQNLoss, ReinforceLoss
from recurl.objectives.value import GAE, TDLambdaEstimator, VTrace
from tests.objectives.simulate import ACTIONS, HIDDEN, OBS, collect, make_agent, recurrent

LOSSES = ["loss_objective", "loss_critic", "loss_entropy"]
AGENTS = [
    ("lstm", True, "cpu", "categorical"),
    ("lstm", False, "loop", "tanh"),
    ("gru", True, "loop", "one_hot"),
    ("gru", False, "pad", "categorical"),
    ("none", True, "pad", "tanh"),
]
OPTIONS = [
    {"normalize_advantage": True, "loss_critic_type": "l2"},
    {"clip_value": 0.1, "entropy_coeff": 0.5},
    {"entropy_bonus": False, "loss_critic_type": "l1"},
]


def not_lowered(modules):
    raise NotCompiled("a test says so")


@pytest.fixture
def on_tensordicts(monkeypatch):
    """Return a function that makes all networks run on TensorDicts."""

    def switch():
        monkeypatch.setattr(network, "Links", not_lowered)

    return switch


def prepared(agent, mask=False):
    agent.step.float()
    batch = collect(agent, 4, 12, 2, dtype=torch.float32)[1]
    if mask:
        batch["collector", "mask"] = torch.rand(4, 12) < 0.7
    return batch


def outcome(loss, batch):
    loss.zero_grad()
    out = loss(batch)
    sum(value for key, value in out.items() if key.startswith("loss")).backward()
    return {**out, **{name: p.grad for name, p in loss.named_parameters() if p.grad is not None}}


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert [key for key in first.keys() if not torch.equal(first[key], second[key])] == []  # noqa: SIM118 - yields rows


def flat(batch):
    return batch.exclude("action_log_prob").flatten_keys()


@pytest.mark.slow
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("cell", "shared", "backend", "kind"), AGENTS)
def test_ppo(cell, shared, backend, kind, options, mask, on_tensordicts):
    agent = make_agent(cell, shared, backend, kind)
    batch = prepared(agent, mask)
    gae, loss = GAE(gamma=0.9, lmbda=0.8, value_network=agent.critic), ClipPPOLoss(agent.actor, agent.critic, **options)
    assert gae.explain()["tensors"] is loss.explain()["tensors"] is None
    ours = gae(batch.clone())
    ours["action_log_prob"] = ours["action_log_prob"] + torch.linspace(-0.5, 0.5, 48).reshape(4, 12)
    parts = list(SequenceMinibatches(ours, 3, 5))
    results = [outcome(loss, part) for part in (ours, *parts)]
    on_tensordicts()
    assert_same(flat(gae(batch)), flat(ours))
    for part, result in zip((ours, *parts), results, strict=True):
        assert_same(outcome(loss, part), result)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("cell", "shared", "backend", "kind"), AGENTS)
def test_policy_gradients_and_estimators(cell, shared, backend, kind, mask, on_tensordicts):
    agent = make_agent(cell, shared, backend, kind)
    batch = prepared(agent, mask)
    batch["action_log_prob"] = batch["action_log_prob"] + torch.linspace(-0.5, 0.5, 48).reshape(4, 12)
    networks = (agent.actor, agent.critic)
    losses = [A2CLoss(*networks, clip_value=0.1), ReinforceLoss(*networks)]
    losses += [loss(*networks).make_value_estimator(name) for loss, name in ((A2CLoss, "vtrace"), (ClipPPOLoss, "td1"))]
    estimators = [VTrace(0.9, *networks), TDLambdaEstimator(0.9, 0.8, agent.critic)]
    assert all(part.explain()["tensors"] is None for part in (*losses, *estimators))

    def outcomes():
        estimated = estimators[0](batch.clone())
        others = [flat(estimator(batch.clone())) for estimator in estimators]
        parts = [estimated, *SequenceMinibatches(estimated, 3, 5, generator=torch.Generator().manual_seed(0))]
        pieces = [outcome(loss, part) for loss in losses[:2] for part in parts]
        return [*others, *pieces, *(outcome(loss, batch) for loss in losses[2:])]

    first = outcomes()
    on_tensordicts()
    for ours, theirs in zip(first, outcomes(), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("cell", ["lstm", "gru", "none"])
@pytest.mark.parametrize("options", [{}, {"double_dqn": True, "n_steps": 3}, {"delay_value": False}])
def test_dqn(cell, options, on_tensordicts):
    agent = make_agent(cell, True)
    batch = prepared(agent)
    batch["action"] = torch.randint(ACTIONS, (4, 12))
    trunk = agent.critic.module[0]
    head = TensorDictModule(MLP(HIDDEN, ACTIONS), in_keys=["features"], out_keys=["action_value"])
    loss = DQNLoss(TensorDictSequential(trunk, head), gamma=0.9, **options)
    assert loss.explain()["tensors"] is None
    result = outcome(loss, batch)
    on_tensordicts()
    assert_same(outcome(loss, batch), result)


def test_minibatches_of_entries_are_the_same_data():
    agent = make_agent("lstm", True)
    loss = ClipPPOLoss(agent.actor, agent.critic)
    batch = GAE(gamma=0.9, lmbda=0.8, value_network=agent.critic)(prepared(agent))

    def minibatches():
        return SequenceMinibatches(batch, 3, slice_len=5, generator=torch.Generator().manual_seed(1))

    for part, entries in zip(minibatches(), minibatches().entries(), strict=True):
        assert isinstance(entries, Entries)
        assert entries.batch_size == part.batch_size
        assert_same(entries.to_tensordict().flatten_keys(), part.flatten_keys())
        assert_same(loss.tensors(entries), loss(part))


def test_reasons():
    agent = make_agent("lstm", True)
    loss = ClipPPOLoss(agent.actor, agent.critic)
    with set_skip_existing(True):
        assert "set_skip_existing is active" in loss.explain()["tensors"]
    handle = agent.critic.module[-1].register_forward_hook(lambda *_: None)
    assert loss.explain()["tensors"] == "ValueOperator has hooks"
    handle.remove()
    assert loss.explain()["tensors"] is None

    class Shout(TensorDictModule):
        def forward(self, tensordict):
            return super().forward(tensordict)

    plain = {"in_keys": ["observation"], "out_keys": ["state_value"]}
    value = torch.nn.Linear(OBS, 1)
    for critic, reason in (
        (Shout(value, **plain), "Shout has its own forward"),
        (TensorDictModule(value, in_keys={"input": "observation"}, out_keys=["state_value"]), "a dict of in_keys"),
        (TensorDictModule(value, method="forward", **plain), "has inplace, method"),
        (TensorDictModule(value, inplace=False, **plain), "has inplace, method"),
        (
            TensorDictSequential(TensorDictModule(value, **plain), inplace=False),
            "TensorDictSequential does more than run its modules in order",
        ),
    ):
        assert reason in ClipPPOLoss(agent.actor, critic).explain()["tensors"]
        assert reason in GAE(gamma=0.9, lmbda=0.8, value_network=critic).explain()["tensors"]


def test_a_hook_added_later_is_run():
    agent, calls = make_agent("gru", True), []
    loss = ClipPPOLoss(agent.actor, agent.critic)
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=agent.critic)
    batch = gae(prepared(agent))
    agent.critic.module[-1].register_forward_hook(lambda *_: calls.append("loss"))
    loss(batch)
    assert calls == ["loss"]
    agent.critic.register_forward_hook(lambda *_: calls.append("whole"))
    gae(batch)
    assert "whole" in calls


def test_networks_with_other_outputs():
    """Uses a dict, nested tensors, an ignored output, and an optional missing input."""

    class Parts(torch.nn.Module):
        def forward(self, x, missing):
            assert missing is None
            return {"a": x, "b": {"inner": 2 * x}}

    class Two(torch.nn.Module):
        def forward(self, x, inner):
            return x, (x + inner).sum(-1, keepdim=True)

    critic = TensorDictSequential(
        TensorDictModule(Parts(), in_keys=["observation", "nothing"], out_keys=["a", "b"]),
        TensorDictModule(Two(), in_keys=["a", ("b", "inner")], out_keys=["_", "state_value"]),
    )
    critic_network = network.Network(list(critic.module))
    x = torch.randn(3, OBS)
    run = critic_network(Entries({"observation": x}, torch.Size([3])))
    assert torch.equal(run["state_value"], (x + 2 * x).sum(-1, keepdim=True))
    assert torch.equal(run["b", "inner"], 2 * x)
    assert "_" not in run


def test_a_custom_sampler_gets_a_tensordict():
    class Sampler(ProbabilisticTensorDictModule):
        def get_dist(self, tensordict):
            assert tensordict.batch_dims == 2
            return super().get_dist(tensordict)

    agent = make_agent("none", True)
    batch = GAE(gamma=0.9, lmbda=0.8, value_network=agent.critic)(prepared(agent))
    net = TensorDictModule(MLP(OBS, 2), in_keys=["observation"], out_keys=["logits"])
    sampler = Sampler(["logits"], ["action"], distribution_class=torch.distributions.Categorical, return_log_prob=True)
    loss = ClipPPOLoss(ProbabilisticTensorDictSequential(net, sampler), agent.critic)
    assert loss(batch)["loss_objective"].isfinite()


def test_missing_entries_of_entries_say_what_to_do():
    agent = make_agent("none", True)
    loss = ClipPPOLoss(agent.actor, agent.critic)
    with pytest.raises(MissingKeyError, match=r"'action', .*Run the advantage estimator"):
        loss.tensors(Entries.of(prepared(agent)))


def test_whole_q_actors_are_lowered():
    net = TensorDictSequential(
        recurrent("lstm", "a", "features", "loop"),
        TensorDictModule(MLP(HIDDEN, ACTIONS), in_keys=["features"], out_keys=["action_value"]),
    )
    assert DQNLoss(QValueActor(net, action_space="categorical")).explain()["tensors"] is None
