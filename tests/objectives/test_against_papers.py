"""Estimators and losses against the papers' formulas in NumPy, float64, over segments that begin and end anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from recurl.objectives import A2CLoss, ClipPPOLoss, ReinforceLoss
from recurl.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace
from tests.objectives.by_segments import outputs, segments, with_cuts
from tests.objectives.simulate import Agent, collect, make_agent

Array = NDArray[np.float64]
GAMMA, LMBDA = 0.93, 0.8
CELLS = [("lstm", True), ("gru", False), ("none", True)]
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def changed(cell: str, shared: bool) -> tuple[Agent, TensorDict]:
    """Return an agent whose weights differ from those that collected the batch."""
    torch.manual_seed(3)
    agent = make_agent(cell, shared, "loop")
    agent.step.double()
    batch = with_cuts(collect(agent, 4, 13, 2)[1])
    with torch.no_grad():
        for parameter in agent.step.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return agent, batch


def run(agent: Agent, cell: str, batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits ``[B, T, A]``, values and next values ``[B, T]``, with graphs, by torch.nn."""
    logits = outputs(agent.actor.module[0], agent.actor.module[1].module, cell, batch)[0]
    value, after = outputs(agent.critic.module[0], agent.critic.module[1].module, cell, batch)
    return logits, value.squeeze(-1), after.squeeze(-1)


def numbers(batch: TensorDict) -> tuple[Array, NDArray[np.bool_], NDArray[np.int64], Array]:
    """Return reward, terminated, action and stored log-probability, ``[B, T]``."""
    reward, terminated = batch["next", "reward"], batch["next", "terminated"]
    first = reward.squeeze(-1).double().numpy(), terminated.squeeze(-1).numpy()
    return *first, batch["action"].numpy(), batch["action_log_prob"].numpy()


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def n_step(t: int, n: int, end: int, reward: Array, terminated: Any, after: Array) -> float:
    """Sutton and Barto (2018), 7.1: n rewards, or those up to the end, and the value after them."""
    last = min(t + n, end) - 1
    rewards = sum(GAMMA ** (i - t) * reward[i] for i in range(t, last + 1))
    return rewards + (0.0 if terminated[last] else GAMMA ** (last - t + 1) * after[last])


def lambda_return(t: int, lmbda: float, end: int, reward: Array, terminated: Any, after: Array) -> float:
    """Sutton and Barto (2018), 12.3: the average of n-step returns, weighted by powers of lambda."""
    steps = end - t
    returns = [n_step(t, n, end, reward, terminated, after) for n in range(1, steps + 1)]
    weighted = sum((1 - lmbda) * lmbda ** (n - 1) * returns[n - 1] for n in range(1, steps))
    return weighted + lmbda ** (steps - 1) * returns[-1]


def over_segments(batch: TensorDict, function: Any) -> Array:
    """Evaluate ``function(row, t, end)`` at every token; ``end`` is the exclusive end of its segment."""
    out = np.full(batch.batch_size, np.nan)
    for row, a, b in segments(batch):
        for t in range(a, b):
            out[row, t] = function(row, t, b)
    return out


RETURNS = {
    "TD0": (lambda critic: TD0Estimator(GAMMA, critic), 0.0),
    "TD1": (lambda critic: TD1Estimator(GAMMA, critic), 1.0),
    "TDLambda": (lambda critic: TDLambdaEstimator(GAMMA, LMBDA, critic), LMBDA),
    "GAE": (lambda critic: GAE(GAMMA, LMBDA, critic), LMBDA),
}


@pytest.mark.parametrize(("cell", "shared"), CELLS)
@pytest.mark.parametrize("name", RETURNS)
def test_returns(name: str, cell: str, shared: bool) -> None:
    agent, batch = changed(cell, shared)
    make, lmbda = RETURNS[name]
    _, value, after = run(agent, cell, batch)
    reward, terminated, _, _ = numbers(batch)
    v, following = value.detach().numpy(), after.detach().numpy()
    expected = over_segments(
        batch, lambda row, t, end: lambda_return(t, lmbda, end, reward[row], terminated[row], following[row])
    )
    found = make(agent.critic)(batch.clone())
    np.testing.assert_allclose(found["value_target"].squeeze(-1), expected, **CLOSE)
    np.testing.assert_allclose(found["advantage"].squeeze(-1), expected - v, **CLOSE)
    np.testing.assert_allclose(found["state_value"].squeeze(-1), v, **CLOSE)
    np.testing.assert_allclose(found["next", "state_value"].squeeze(-1), np.where(terminated, 0, following), **CLOSE)


@pytest.mark.parametrize("name", RETURNS)
def test_gradients_of_returns(name: str) -> None:
    """Targets are linear in next values, so their weights are differences of NumPy results."""
    agent, batch = changed("gru", False)
    make, lmbda = RETURNS[name]
    _, value, after = run(agent, "gru", batch)
    reward, terminated, _, _ = numbers(batch)
    weight = np.random.default_rng(0).normal(size=(4, 13))
    slopes = np.zeros((4, 13))

    def total(following: Array, row: int) -> float:
        return sum(
            weight[r, t] * lambda_return(t, lmbda, b, reward[r], terminated[r], following)
            for r, a, b in segments(batch)
            for t in range(a, b)
            if r == row
        )

    for row in range(4):
        for t in range(13):
            unit = np.eye(13)[t]
            slopes[row, t] = total(unit, row) - total(np.zeros(13), row)
    critic = list(agent.critic.parameters())
    expected = torch.autograd.grad(after, critic, torch.from_numpy(slopes), retain_graph=True)
    estimator = make(agent.critic)
    estimator.differentiable = True
    found = estimator(batch.clone())
    ours = torch.autograd.grad(found["value_target"].squeeze(-1), critic, torch.from_numpy(weight), retain_graph=True)
    torch.testing.assert_close(ours, expected, **CLOSE)
    both = torch.autograd.grad([after, value], critic, [torch.from_numpy(slopes), torch.from_numpy(-weight)])
    torch.testing.assert_close(
        torch.autograd.grad(found["advantage"].squeeze(-1), critic, torch.from_numpy(weight)), both, **CLOSE
    )


def vtrace(
    batch: TensorDict, log_ratio: Array, v: Array, after: Array, rho_max: float, c_max: float
) -> tuple[Array, Array]:
    """Espeholt et al. (2018), equation 1 as written: the sum over s of products of c; and r + gamma v' - V."""
    reward, terminated, _, _ = numbers(batch)
    rho, c = np.minimum(rho_max, np.exp(log_ratio)), np.minimum(c_max, np.exp(log_ratio))
    delta = rho * (reward + GAMMA * np.where(terminated, 0.0, after) - v)
    target = over_segments(
        batch,
        lambda row, t, end: (
            v[row, t] + sum(GAMMA ** (i - t) * np.prod(c[row, t:i]) * delta[row, i] for i in range(t, end))
        ),
    )
    advantage = over_segments(
        batch,
        lambda row, t, end: (
            reward[row, t]
            + GAMMA * (0.0 if terminated[row, t] else target[row, t + 1] if t + 1 < end else after[row, t])
            - v[row, t]
        ),
    )
    return advantage, target


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (1.5, 0.7), (np.inf, np.inf)])
@pytest.mark.parametrize(("cell", "shared"), CELLS)
def test_vtrace(cell: str, shared: bool, thresholds: tuple[float, float]) -> None:
    agent, batch = changed(cell, shared)
    logits, value, after = run(agent, cell, batch)
    _, _, action, stored = numbers(batch)
    log_prob = np.take_along_axis(log_softmax(logits.detach().numpy()), action[..., None], -1).squeeze(-1)
    log_ratio = log_prob - stored
    assert np.abs(log_ratio).max() > 0.1
    advantage, target = vtrace(batch, log_ratio, value.detach().numpy(), after.detach().numpy(), *thresholds)
    for weighted in (True, False):
        estimator = VTrace(GAMMA, agent.actor, agent.critic, *thresholds, weight_advantage=weighted)
        found = estimator(batch.clone())
        rho = np.minimum(thresholds[0], np.exp(log_ratio)) if weighted else 1.0
        np.testing.assert_allclose(found["value_target"].squeeze(-1), target, **CLOSE)
        np.testing.assert_allclose(found["advantage"].squeeze(-1), rho * advantage, **CLOSE)
        np.testing.assert_allclose(found["importance_weight"].squeeze(-1), np.exp(log_ratio), **CLOSE)


@pytest.mark.parametrize(("cell", "shared"), CELLS)
def test_vtrace_of_the_policy_that_acted_is_the_n_step_return(cell: str, shared: bool) -> None:
    """Also with thresholds of 1; n is the number of remaining steps of the segment."""
    torch.manual_seed(1)
    agent = make_agent(cell, shared, "loop")
    agent.step.double()
    batch = collect(agent, 4, 13, 2)[1]
    _, _, after = run(agent, cell, batch)
    reward, terminated, _, _ = numbers(batch)
    following = after.detach().numpy()
    expected = over_segments(
        batch, lambda row, t, end: n_step(t, end - t, end, reward[row], terminated[row], following[row])
    )
    for threshold in (1.0, np.inf):
        found = VTrace(GAMMA, agent.actor, agent.critic, threshold, threshold)(batch.clone())
        np.testing.assert_allclose(found["value_target"].squeeze(-1), expected, **CLOSE)
        np.testing.assert_allclose(found["importance_weight"].squeeze(-1), 1.0, **CLOSE)
        torch.testing.assert_close(
            found["value_target"], TD1Estimator(GAMMA, agent.critic)(batch.clone())["value_target"], **CLOSE
        )


def test_gradients_of_vtrace() -> None:
    """Derivatives of targets with respect to log-probabilities and values, by central differences of NumPy results."""
    agent, batch = changed("gru", False)
    batch = batch[:2, :6]
    logits, value, after = run(agent, "gru", batch)
    _, _, action, stored = numbers(batch)
    log_prob = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(action)[..., None]).squeeze(-1)
    weight = np.random.default_rng(0).normal(size=(2, 6))
    here = [x.detach().numpy() for x in (log_prob, value, after)]

    def total(log_prob: Array, v: Array, following: Array) -> float:
        return float((weight * vtrace(batch, log_prob - stored, v, following, 1.1, 0.9)[1]).sum())

    slopes = []
    for index, array in enumerate(here):
        slope = np.zeros_like(array)
        for at in np.ndindex(array.shape):
            sides = []
            for sign in (1, -1):
                moved = [x.copy() for x in here]
                moved[index][at] += sign * 1e-6
                sides.append(total(*moved))
            slope[at] = (sides[0] - sides[1]) / 2e-6
        slopes.append(torch.from_numpy(slope))
    parameters = list(agent.step.parameters())
    expected = torch.autograd.grad([log_prob, value, after], parameters, slopes)
    found = VTrace(GAMMA, agent.actor, agent.critic, 1.1, 0.9, differentiable=True)(batch.clone())["value_target"]
    ours = torch.autograd.grad(found.squeeze(-1), parameters, torch.from_numpy(weight))
    torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-8)


def distances(kind: str, value: Array, target: Array) -> tuple[Array, Array]:
    """Return the distance and its derivative with respect to the value."""
    difference = value - target
    if kind == "l2":
        return difference**2, 2 * difference
    if kind == "l1":
        return np.abs(difference), np.sign(difference)
    near = np.abs(difference) < 1
    return np.where(near, difference**2 / 2, np.abs(difference) - 0.5), np.clip(difference, -1, 1)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(
    ("kind", "clip_value", "cell", "shared"),
    [("l2", 0.0, "lstm", True), ("smooth_l1", 0.2, "gru", False), ("l1", 0.1, "none", True)],
)
@pytest.mark.parametrize("loss_type", [A2CLoss, ReinforceLoss])
def test_policy_gradients(loss_type: Any, kind: str, clip_value: float, cell: str, shared: bool, mask: bool) -> None:
    """Losses and every gradient: Mnih et al. (2016), S3; Williams (1992)."""
    agent, batch = changed(cell, shared)
    VTrace(GAMMA, agent.actor, agent.critic)(batch)
    batch["state_value"] = batch["state_value"] + 0.3 * torch.randn_like(batch["state_value"])
    counts = np.ones((4, 13), dtype=bool)
    if mask:  # whole segments, so that the valid ones stay unchanged
        for index, (row, a, b) in enumerate(segments(batch)):
            counts[row, a:b] = index % 3 != 0
        batch["collector", "mask"] = torch.from_numpy(counts)
    logits, value, _ = run(agent, cell, batch)
    _, _, action, _ = numbers(batch)
    log_p, v = log_softmax(logits.detach().numpy()), value.detach().numpy()
    p, n = np.exp(log_p), counts.sum()
    advantage, target, old = (batch[key].squeeze(-1).numpy() for key in ("advantage", "value_target", "state_value"))
    chosen = np.take_along_axis(log_p, action[..., None], -1).squeeze(-1)
    distance, slope = distances(kind, v, target)
    if clip_value:
        clipped, _ = distances(kind, np.clip(v, old - clip_value, old + clip_value), target)
        _, inner = distances(kind, np.clip(v, old - clip_value, old + clip_value), target)
        slope = np.where(distance >= clipped, slope, inner * (np.abs(v - old) <= clip_value))
        distance = np.maximum(distance, clipped)
    entropy = -(p * log_p).sum(-1)
    coefficients = {"entropy_coeff": 0.3, "critic_coeff": 0.7} if loss_type is A2CLoss else {}
    names = ("loss_objective", "loss_critic") if loss_type is A2CLoss else ("loss_actor", "loss_value")
    critic_coeff, entropy_coeff = (0.7, 0.3) if loss_type is A2CLoss else (1.0, 0.0)
    expected = {
        names[0]: -(chosen * advantage)[counts].sum() / n,
        names[1]: critic_coeff * distance[counts].sum() / n,
    }
    if loss_type is A2CLoss:
        residual = (target - v)[counts]
        expected |= {
            "loss_entropy": -entropy_coeff * entropy[counts].sum() / n,
            "entropy": entropy[counts].sum() / n,
            "explained_variance": 1 - residual.var() / target[counts].var(),
        }
    # d log p(a) / d logits = 1[a] - p;  d entropy / d logits = -p (log p + entropy)
    score = np.eye(2)[action] - p
    of_logits = -advantage[..., None] * score + entropy_coeff * p * (log_p + entropy[..., None])
    of_logits, of_values = (
        x * (counts / n).reshape(4, 13, *(1,) * (x.ndim - 2)) for x in (of_logits, critic_coeff * slope)
    )
    parameters = list(agent.step.parameters())
    wanted = torch.autograd.grad(
        [logits, value], parameters, [torch.from_numpy(of_logits), torch.from_numpy(of_values)]
    )

    loss = loss_type(agent.actor, agent.critic, loss_critic_type=kind, clip_value=clip_value, **coefficients)
    found = loss(batch)
    assert set(found.keys()) == set(expected) == set(loss.out_keys)
    for key, number in expected.items():
        np.testing.assert_allclose(found[key].item(), number, **CLOSE)
    total = sum(found[key] for key in expected if key.startswith("loss"))
    torch.testing.assert_close(torch.autograd.grad(total, parameters), wanted, **CLOSE)


def test_with_weights_of_one_clipped_and_plain_gradients_agree() -> None:
    """The first step of APPO from the behavior policy equals that of IMPALA."""
    torch.manual_seed(1)
    agent = make_agent("gru", True, "loop")
    agent.step.double()
    batch = collect(agent, 4, 13, 2)[1]
    parameters = list(agent.step.parameters())
    gradients = []
    for weighted, loss_type in ((True, A2CLoss), (False, ClipPPOLoss)):
        data = VTrace(GAMMA, agent.actor, agent.critic, weight_advantage=weighted)(batch.clone())
        losses = loss_type(agent.actor, agent.critic)(data)
        total = sum(losses[key] for key in ("loss_objective", "loss_critic", "loss_entropy"))
        gradients.append(torch.autograd.grad(total, parameters))
    torch.testing.assert_close(*gradients, **CLOSE)
