"""Properties of every value estimator: layouts, modes, padding, devices, isolated trajectories, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from recurl.modules import MLP
from recurl.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace
from recurl.sequences.mode import recurrent_mode, set_recurrent_mode
from tests.objectives.simulate import OBS, Agent, collect, make_agent

MAKE: dict[str, Callable[[Agent], Any]] = {
    "GAE": lambda agent: GAE(0.9, 0.8, agent.critic),
    "TD0": lambda agent: TD0Estimator(0.9, agent.critic),
    "TD1": lambda agent: TD1Estimator(0.9, agent.critic),
    "TDLambda": lambda agent: TDLambdaEstimator(0.9, 0.8, agent.critic),
    "VTrace": lambda agent: VTrace(0.9, agent.actor, agent.critic),
}
every = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def prepared(cell: str = "gru", shared: bool = True, **options: Any) -> tuple[Agent, TensorDict]:
    agent = make_agent(cell, shared, "loop")
    agent.step.double()
    batch = collect(agent, **{"rows": 4, "steps": 9, "batches": 2, **options})[1]
    batch["action_log_prob"] = batch["action_log_prob"] + 0.3 * torch.randn(batch.shape, dtype=torch.float64)
    return agent, batch


@every
@pytest.mark.parametrize(("cell", "shared"), [("lstm", True), ("gru", False), ("none", True)])
def test_layouts_agree(make: Callable, cell: str, shared: bool) -> None:
    """[B, T], all rows flat, permuted rows, and [1, B, T]."""
    agent, batch = prepared(cell, shared)
    estimator = make(agent)
    expected = estimator(batch.clone())
    order = torch.randperm(4)
    flat, permuted, deep = (
        estimator(data.clone()) for data in (batch.reshape(-1), batch[order], batch.reshape(1, 4, 9))
    )
    for key in estimator.out_keys:
        torch.testing.assert_close(flat[key], expected[key].reshape(-1, 1), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(permuted[key], expected[key][order], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(deep[key][0], expected[key], rtol=1e-10, atol=1e-10)


@every
@pytest.mark.parametrize("mode", [True, False, None])
def test_mode_states_and_gradients_stay(make: Callable, mode: bool | None) -> None:
    agent, batch = prepared("lstm", False)
    before, estimator = batch.clone(), make(agent)
    with set_recurrent_mode(mode):
        assert estimator(batch) is batch
        assert recurrent_mode() is mode
    changed = {key for key in batch.keys(True, True) if key not in before.keys(True, True)}
    assert changed <= set(estimator.out_keys)
    kept = set(before.keys(True, True)) - set(estimator.out_keys)
    assert all(torch.equal(before[key], batch[key]) for key in kept)
    assert not any(batch[key].requires_grad for key in estimator.out_keys)
    assert all(batch[key].shape == (4, 9, 1) for key in estimator.out_keys)
    read = {key if isinstance(key, str) else tuple(key) for key in estimator.in_keys}
    few = estimator(before.select(*read, ("collector", "traj_ids"), "is_init", strict=False))
    assert torch.equal(few["advantage"], batch["advantage"])


@every
def test_differentiable(make: Callable) -> None:
    agent, batch = prepared()
    estimator = make(agent)
    estimator.differentiable = True
    estimator(batch)["advantage"].square().sum().backward()
    assert all(parameter.grad is not None for parameter in estimator.parameters())


@every
@pytest.mark.parametrize("junk", [1e4, torch.nan, torch.inf])
def test_padding_may_hold_anything(make: Callable, junk: float) -> None:
    agent, batch = prepared(end=0.0)
    estimator = make(agent)
    expected = estimator(batch[:, :5].clone())
    counts = torch.zeros(4, 9, dtype=torch.bool)
    counts[:, :5] = True
    for key in ("observation", ("next", "observation"), ("next", "reward"), "action_log_prob"):
        batch[key][:, 5:] = junk
    batch["collector", "mask"] = counts
    found = estimator(batch)
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(found[key][:, :5], expected[key])
        assert found[key][:, 5:].count_nonzero() == 0


@every
def test_a_trajectory_reaches_no_other(make: Callable) -> None:
    agent, batch = prepared(end=0.4)
    estimator = make(agent)
    expected = estimator(batch.clone())
    ids = batch["collector", "traj_ids"]
    for trajectory in ids.unique()[[0, 3, -1]]:
        here = (ids == trajectory).unsqueeze(-1)
        sick = batch.clone()
        for key in ("observation", ("next", "observation"), ("next", "reward")):
            sick[key] = sick[key].masked_fill(here, torch.nan)
        found = estimator(sick)
        assert all(torch.equal(found[key][~here], expected[key][~here]) for key in estimator.out_keys)
        assert found["value_target"][here].isnan().all()


@every
def test_only_terminated_stops_bootstrapping(make: Callable) -> None:
    """Ends of every kind: the next observation counts, except after ``terminated``."""
    agent, batch = prepared("none")
    estimator = make(agent)
    done = batch["next", "done"].clone()
    done[:, -1] = True
    terminated = batch["next", "terminated"]
    assert terminated.any()
    assert (done & ~terminated).any()
    moved = batch.clone()
    moved["next", "observation"] = torch.where(done, moved["next", "observation"] + 1.0, moved["next", "observation"])
    first, second = estimator(batch), estimator(moved)
    changed = first["value_target"] != second["value_target"]
    assert not changed[terminated].any()
    assert changed[done & ~terminated].all()


@every
def test_nothing_is_read_back_from_the_device(make: Callable) -> None:
    """A meta tensor has no data to read: anything that would synchronize with a device fails on it."""
    agent, batch = prepared("none")
    batch = batch.to("meta")
    batch["collector", "mask"] = torch.ones(4, 9, dtype=torch.bool, device="meta")
    agent.step.to("meta")
    assert make(agent)(batch)["advantage"].device.type == "meta"


@every
def test_rewards_and_advantages_may_be_standardised(make: Callable) -> None:
    agent, batch = prepared()
    estimator = make(agent)
    plain = estimator(batch.clone())
    if isinstance(estimator, GAE | VTrace):
        name = "average_gae" if isinstance(estimator, GAE) else "average_adv"
        arguments = (0.9, 0.8, agent.critic) if isinstance(estimator, GAE) else (0.9, agent.actor, agent.critic)
        found = type(estimator)(*arguments, **{name: True})(batch.clone())
        advantage = plain["advantage"]
        expected = (advantage - advantage.mean()) / advantage.std(correction=0)
        torch.testing.assert_close(found["advantage"], expected)
        torch.testing.assert_close(found["value_target"], plain["value_target"])
        return
    arguments = (0.9, 0.8) if isinstance(estimator, TDLambdaEstimator) else (0.9,)
    found = type(estimator)(*arguments, agent.critic, average_rewards=True)(batch.clone())
    reward = batch["next", "reward"].double()
    batch["next", "reward"] = (reward - reward.mean()) / reward.std(correction=0)
    torch.testing.assert_close(found["value_target"], estimator(batch)["value_target"])


@every
def test_invalid_arguments(make: Callable) -> None:
    agent, batch = prepared("none")
    estimator = make(agent)
    kind, arguments = type(estimator), {"value_network": agent.critic}
    if kind is VTrace:
        arguments["actor_network"] = agent.actor
    if kind in (GAE, TDLambdaEstimator):
        arguments["lmbda"] = 0.9
        with pytest.raises(ArgumentError, match=r"lmbda must be in \[0, 1\], got 2"):
            kind(**{**arguments, "gamma": 0.9, "lmbda": 2})
    for argument in ("shifted", "deactivate_vmap", "time_dim", "vectorized", "skip_existing", "device", "value_key"):
        with pytest.raises(ArgumentTypeError, match=f"{kind.__name__} has no argument '{argument}': "):
            kind(gamma=0.9, **arguments, **{argument: True})
    with pytest.raises(ArgumentError, match=r"gamma must be in \[0, 1\], got -1"):
        kind(gamma=-1, **arguments)
    head = TensorDictModule(MLP(OBS, 1), in_keys=["features"], out_keys=["state_value"])
    with pytest.raises(MissingKeyError, match="Pass a value_network that includes the trunk"):
        kind(**{**arguments, "value_network": head, "gamma": 0.9})(batch.set("features", batch["observation"]))
    for key in ("reward", "done", "terminated"):
        with pytest.raises(MissingKeyError, match=f"needs an entry .*{key}"):
            estimator(batch.exclude(("next", key)))


@every
def test_values_that_are_there_can_be_used(make: Callable) -> None:
    agent, batch = prepared("lstm", True)
    estimator = make(agent)
    expected = estimator(batch)
    given = {"state_value": batch["state_value"], ("next", "state_value"): batch["next", "state_value"]}
    estimator.value_network = None
    found = estimator(batch.clone().update(TensorDict(given, batch.shape)))
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(found[key], expected[key])
    with pytest.raises(MissingKeyError, match=r"needs an entry 'state_value'.* pass a value_network"):
        estimator(batch.exclude("state_value"))


def test_invalid_arguments_of_vtrace() -> None:
    agent, batch = prepared()
    for name in ("rho_thresh", "c_thresh"):
        with pytest.raises(ArgumentError, match=f"{name} must be positive, got 0"):
            VTrace(0.9, agent.actor, agent.critic, **{name: 0.0})
    with pytest.raises(ArgumentError, match="VTrace needs action probabilities"):
        VTrace(0.9, agent.critic, agent.critic)
    with pytest.raises(MissingKeyError, match=r"needs an entry 'action_log_prob'.*return_log_prob=True"):
        VTrace(0.9, agent.actor, agent.critic)(batch.exclude("action_log_prob"))
    first, second = make_agent("gru", True), make_agent("gru", True)
    with pytest.raises(ArgumentError, match="Actor and critic must not share state keys"):
        VTrace(0.9, first.actor, second.critic)


def test_modules_that_actor_and_critic_share_run_once() -> None:
    agent, batch = prepared("lstm", True, end=0.0)
    calls: list[Any] = []
    agent.actor.module[0].register_forward_hook(lambda *_: calls.append(recurrent_mode()))
    VTrace(0.9, agent.actor, agent.critic)(batch)
    assert calls == [True, False]  # along the sequences, and one step past their ends


def test_ratios_that_overflow_are_truncated() -> None:
    agent, batch = prepared("none")
    batch["action_log_prob"] = batch["action_log_prob"] - 1e4
    out: Tensor = VTrace(0.9, agent.actor, agent.critic, differentiable=True)(batch)["value_target"]
    assert out.isfinite().all()
    gradients = torch.autograd.grad(out.sum(), list(agent.step.parameters()), allow_unused=True)
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


@every
@pytest.mark.parametrize("key", [("next", "done"), ("next", "terminated")])
def test_flags_that_are_not_bool_are_named(make: Callable, key: Any) -> None:
    agent, batch = prepared()
    batch[key] = batch[key].float()
    with pytest.raises(ArgumentError, match=rf"The entry \('next', '{key[1]}'\) must be bool, got torch.float32"):
        make(agent)(batch)
