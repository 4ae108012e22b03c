"""Renaming of all entries that losses and estimators read or write, and the choice of estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UnsupportedError
from recurl.core.keys import NestedKey
from recurl.modules import MLP, Categorical, NormalParamExtractor, ProbabilisticActor, TanhNormal
from recurl.objectives import A2CLoss, ClipPPOLoss, DiscreteSACLoss, DQNLoss, SACLoss, TD3Loss, ValueEstimators
from recurl.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator
from recurl.sequences.returns import lambda_return, n_step_return
from tests.objectives.simulate import Agent, collect, make_agent
from tests.objectives.test_dqn import make_loss

UNDER_NEXT = ("reward", "done", "terminated")
FRESH = ("deep", "name")
ESTIMATORS = {
    "GAE": lambda critic: GAE(0.9, 0.8, critic, average_gae=True),
    "TD0": lambda critic: TD0Estimator(0.9, critic),
    "TD1": lambda critic: TD1Estimator(0.9, critic, average_rewards=True),
    "TDLambda": lambda critic: TDLambdaEstimator(0.9, 0.8, critic),
}


def renamed(module: TensorDictSequential, key: NestedKey, name: NestedKey) -> TensorDictSequential:
    """Return the network with its output ``key`` renamed to ``name``."""
    return TensorDictSequential(module, TensorDictModule(torch.nn.Identity(), in_keys=[key], out_keys=[name]))


def collected(agent: Agent) -> TensorDict:
    agent.step.double()
    return collect(agent, 3, 8, 1)[0]


def ppo(critic: Callable[[Any], Any] = lambda critic: critic, **options: Any) -> tuple[ClipPPOLoss, TensorDict]:
    torch.manual_seed(0)
    agent = make_agent("gru", True, "loop")
    batch = GAE(0.9, 0.8, agent.critic)(collected(agent))
    return ClipPPOLoss(agent.actor, critic(agent.critic), clip_value=0.1, **options), batch


def dqn(network: Callable[[Any], Any] = lambda network: network) -> tuple[DQNLoss, TensorDict]:
    torch.manual_seed(0)
    loss, agent = make_loss("gru", backend="loop", double_dqn=True, n_steps=2)
    batch = collect(agent, 3, 8, 1)[0]
    batch["priority_weight"] = torch.rand(3, 8, dtype=torch.float64)
    loss.value_network, loss.target_value_network = map(network, (loss.value_network, loss.target_value_network))
    return loss, batch


def moved(batch: TensorDict, name: str, key: NestedKey) -> TensorDict:
    """Return the batch with the entry ``key`` (under ``"next"`` if it is read there) moved to ``FRESH``."""
    if name in UNDER_NEXT:
        return batch.clone(False).rename_key_(("next", *([key] if isinstance(key, str) else key)), ("next", *FRESH))
    return batch.clone(False).rename_key_(key, FRESH) if key in batch.keys(True) else batch


@pytest.mark.parametrize("name", ["advantage", "value_target", "value", "reward", "done", "terminated"])
@pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS)
def test_estimators(make: Callable[[Any], Any], name: str) -> None:
    agent = make_agent("lstm", False, "loop")
    batch = collected(agent).exclude("state_value")
    expected = make(agent.critic)(batch.clone())
    estimator = make(renamed(agent.critic, "state_value", FRESH) if name == "value" else agent.critic)
    key = getattr(estimator.tensor_keys, name)
    estimator.set_keys(**{name: FRESH})
    assert getattr(estimator.tensor_keys, name) == FRESH
    found = estimator(moved(batch, name, key))
    assert set(estimator.out_keys) <= set(found.keys(True))
    assert all(torch.equal(found[a], expected[b]) for a, b in zip(estimator.out_keys, make(None).out_keys, strict=True))
    selected = moved(batch, name, key).select(*estimator.in_keys, "is_init", strict=False)
    assert torch.equal(estimator(selected)[estimator.out_keys[0]], found[estimator.out_keys[0]])


@pytest.mark.parametrize("name", ClipPPOLoss.accepted_keys)
def test_ppo(name: str) -> None:
    loss, batch = ppo()
    expected = loss(batch)
    if name == "value":
        loss, batch = ppo(lambda critic: renamed(critic, "state_value", FRESH))
    key = getattr(loss.tensor_keys, name)
    loss.set_keys(**{name: FRESH})
    batch = moved(batch, name, key)
    found = loss(batch.select(*loss.in_keys, strict=False))
    assert all(torch.equal(found[key], expected[key]) for key in expected.keys())  # noqa: SIM118 - yields rows
    loss.make_value_estimator("td0", gamma=0.5)
    assert loss.value_estimator.tensor_keys.reward == loss.tensor_keys.reward
    loss.set_keys(**{name: None})
    assert getattr(loss.tensor_keys, name) == key


@pytest.mark.parametrize("name", DQNLoss.accepted_keys)
def test_dqn(name: str) -> None:
    loss, batch = dqn()
    expected = loss(batch)
    if name == "action_value":
        loss, batch = dqn(lambda network: renamed(network, "action_value", FRESH))
    key = getattr(loss.tensor_keys, name)
    loss.set_keys(**{name: FRESH})
    found = loss(moved(batch, name, key).select(*loss.in_keys, strict=False))
    for ours, theirs in zip(loss.out_keys, ["loss", "td_error", "q_value", "q_target"], strict=True):
        assert torch.equal(found[ours], expected[theirs])


def test_keys_of_the_networks_hold_unless_others_are_set() -> None:
    loss, _ = ppo()
    assert loss.tensor_keys.sample_log_prob == "action_log_prob"
    q, _ = dqn()
    assert q.tensor_keys.action_value == "action_value"
    q.value_network.action_value_key = "worth"
    assert q.tensor_keys.action_value == "worth"
    q.set_keys(action_value="value")
    assert q.tensor_keys.action_value == "value"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"GAE has no entries named \['sample_log_prob'\]: set_keys takes \['adv"):
        GAE(0.9, 0.9, None).set_keys(sample_log_prob="log_prob")
    with pytest.raises(ArgumentError, match=r"DQNLoss has no entries named \['advantage'\]"):
        dqn()[0].set_keys(advantage="gain")


KINDS: dict[Any, Callable[[Any], Any]] = {
    None: lambda critic: GAE(0.99, 0.95, critic),
    ValueEstimators.GAE: lambda critic: GAE(0.99, 0.95, critic),
    "td0": lambda critic: TD0Estimator(0.99, critic),
    "TD1": lambda critic: TD1Estimator(0.99, critic),
    ValueEstimators.TDLambda: lambda critic: TDLambdaEstimator(0.99, 0.95, critic),
}


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_estimate_where_a_batch_has_no_advantage(kind: Any, mask: bool) -> None:
    loss, batch = ppo()
    if mask:
        batch["collector", "mask"] = torch.rand(3, 8) < 0.7
    expected = loss(KINDS[kind](loss.critic_network)(batch.clone()))
    plain = batch.exclude("advantage", "value_target")
    names = set(plain.keys(True))
    with pytest.raises(MissingKeyError, match=r"Or call make_value_estimator\(\)"):
        loss(plain)
    assert loss.make_value_estimator(kind) is loss
    found = loss(plain.select(*loss.in_keys, "is_init", strict=False))
    assert set(plain.keys(True)) == names
    assert all(torch.equal(found[key], expected[key]) for key in expected.keys())  # noqa: SIM118 - yields rows
    given = batch.clone()
    given["advantage"] = torch.ones_like(given["advantage"])
    assert not torch.equal(loss(given)["loss_objective"], found["loss_objective"])


def test_returns_of_action_values() -> None:
    """TD(0), TD(1) and lambda-returns are targets; the default is the n-step return of the loss."""
    loss, batch = dqn()
    first = loss(batch)["q_target"]
    assert loss.make_value_estimator(gamma=0.9) is loss
    assert torch.equal(loss(batch)["q_target"], first)
    targets = {}
    for kind, options in {"td1": {}, "tdlambda": {"lmbda": 1.0}, "td0": {}}.items():
        loss.make_value_estimator(kind, **options)
        targets[kind] = loss(batch)["q_target"]
    assert torch.equal(targets["td1"], targets["tdlambda"])
    assert loss.n_steps == 1
    assert loss.lmbda is None
    loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.9, lmbda=0.0)
    torch.testing.assert_close(loss(batch)["q_target"], targets["td0"])


def test_kinds_and_hyperparameters_that_are_not_there() -> None:
    loss, q = ppo()[0], dqn()[0]
    with pytest.raises(ArgumentError, match=r"value_type must be one of \['TD0', .*, got 'gea'"):
        loss.make_value_estimator("gea")
    with pytest.raises(UnsupportedError, match=r"DQNLoss has no GAE: it takes \['TD0', 'TD1', 'TDLambda'\]"):
        q.make_value_estimator(ValueEstimators.GAE)
    with pytest.raises(
        ArgumentTypeError, match=r"TD0 has no hyperparameters \['lmbda'\]: it takes \['average_rewards', "
    ):
        loss.make_value_estimator("TD0", lmbda=0.9)
    with pytest.raises(
        ArgumentTypeError, match=r"The default has no hyperparameters \['lmbda'\]: it takes \['gamma'\]"
    ):
        q.make_value_estimator(lmbda=0.9)
    for make in (loss.make_value_estimator, q.make_value_estimator):
        with pytest.raises(ArgumentError, match=r"gamma must be in \[0, 1\], got 1.5"):
            make("td0", gamma=1.5)


def test_lambda_returns_against_a_loop() -> None:
    reward, value = torch.randn(2, 3, 11, dtype=torch.float64)
    terminated, cut = torch.rand(2, 3, 11) < 0.2
    for lmbda in (0.0, 0.6, 1.0):
        found = lambda_return(0.9, lmbda, value, reward, terminated, cut)
        for row in range(3):
            after = 0.0
            for t in reversed(range(11)):
                bootstrap = 0.0 if terminated[row, t] else value[row, t].item()
                ends = bool(terminated[row, t] or cut[row, t] or t == 10)
                after = reward[row, t].item() + 0.9 * (bootstrap if ends else (1 - lmbda) * bootstrap + lmbda * after)
                assert found[row, t].item() == pytest.approx(after, rel=1e-12)
    ends = lambda_return(0.9, 0.0, value, reward, terminated, cut)
    torch.testing.assert_close(ends, n_step_return(0.9, 1, value, reward, terminated, cut))


def flat_batch(*actions: int) -> TensorDict:
    after = TensorDict({"observation": torch.randn(4, 3), "reward": torch.ones(4, 1)}, [4])
    after["done"] = after["terminated"] = torch.tensor([[False], [True], [False], [True]])
    return TensorDict(
        {"observation": torch.randn(4, 3), "next": after, "deep": {"action": torch.rand(4, *actions)}}, [4]
    )


def test_networks_may_write_nothing_but_the_renamed_entries() -> None:
    value = TensorDictModule(torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=[FRESH])
    gae = GAE(0.9, 0.8, value)
    gae.set_keys(value=FRESH)
    assert gae(flat_batch())["next", *FRESH].shape == (4, 1)
    choices = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=[FRESH])
    head = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
    chooser = ProbabilisticActor(
        head, in_keys=["logits"], out_keys=[("deep", "action")], distribution_class=Categorical
    )
    dqn, soft = DQNLoss(choices), DiscreteSACLoss(chooser, choices)
    batch = flat_batch()
    batch["deep", "action"] = torch.tensor([0, 1, 1, 0])
    for loss in (dqn, soft):
        loss.set_keys(action_value=FRESH, action=("deep", "action"))
        assert loss(batch)["td_error"].isfinite().all()


@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_actions_and_values_of_critics_may_have_other_names_alone(kind: str) -> None:
    q = TensorDictModule(MLP(5, 1), in_keys=["observation", ("deep", "action")], out_keys=[FRESH])
    if kind == "sac":
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
        head = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
        loss: Any = SACLoss(
            ProbabilisticActor(head, ["loc", "scale"], [("deep", "action")], distribution_class=TanhNormal), q
        )
    else:
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
        loss = TD3Loss(TensorDictModule(net, ["observation"], [("deep", "action")]), q, bounds=(-1.0, 1.0))
    assert loss.tensor_keys.action == ("deep", "action")
    with pytest.raises(ArgumentError, match=r"A critic must write 'state_action_value', .*, or call set_keys of"):
        loss(flat_batch(2))
    loss.set_keys(state_action_value=FRESH)
    found = loss(flat_batch(2))
    assert found["td_error"].shape == (4, 1)
    assert found["loss_actor"].requires_grad


@pytest.mark.parametrize(
    ("kind", "argument", "advice"),
    [
        (SACLoss, "delay_qvalue", "the critics have delayed copies"),
        (SACLoss, "action_spec", "the actor's distribution has the bounds"),
        (TD3Loss, "priority_key", r"write set_keys\(priority=...\)"),
        (DiscreteSACLoss, "num_actions", "the number of choices follows from the actor's distribution"),
        (A2CLoss, "gamma", r"make_value_estimator\(gamma=...\)"),
    ],
)
def test_arguments_of_torchrl_say_what_to_write(kind: Any, argument: str, advice: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"{kind.__name__} has no argument '{argument}': .*{advice}"):
        kind(None, None, **{argument: None})
