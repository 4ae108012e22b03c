"""Numerical properties of every loss."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, jvp

from recurl.core.errors import ArgumentError
from recurl.objectives import A2CLoss, ClipPPOLoss, DQNLoss, LossModule, ReinforceLoss
from recurl.objectives.policy_gradient import PolicyGradientLoss
from recurl.objectives.value import GAE, VTrace
from tests.objectives.replay_losses import make_replay_loss
from tests.objectives.simulate import collect, make_agent
from tests.objectives.test_dqn import make_loss


def ppo(cell: str, backend: str, kind: str = "categorical", **options: object) -> tuple[ClipPPOLoss, TensorDict]:
    agent = make_agent(cell, True, backend, kind)
    agent.step.double()
    batch = collect(agent, 4, 9, 1, dtype=torch.float64)[0]
    batch = GAE(gamma=0.9, lmbda=0.9, value_network=agent.critic)(batch)
    batch["action_log_prob"] = batch["action_log_prob"] + 0.3 * torch.randn_like(batch["action_log_prob"])
    return ClipPPOLoss(agent.actor, agent.critic, clip_value=0.1, **options), batch


def gradient(cell: str, backend: str, kind: Callable, **options: object) -> tuple[LossModule, TensorDict]:
    loss, batch = ppo(cell, backend)
    batch = VTrace(0.9, loss.actor_network, loss.critic_network)(batch)
    return kind(loss.actor_network, loss.critic_network, clip_value=0.1, **options), batch


def dqn(cell: str, backend: str, **options: object) -> tuple[DQNLoss, TensorDict]:
    loss, agent = make_loss(cell, backend=backend, n_steps=2, double_dqn=True, **options)
    return loss, collect(agent, 4, 9, 1, dtype=torch.float64)[0]


def total(loss: LossModule, batch: TensorDict) -> Tensor:
    return sum((value for key, value in loss(batch).items() if key.startswith("loss")), torch.zeros(()))


def replay(kind: str, memory: str) -> Callable:
    def make(cell: str, backend: str) -> tuple[LossModule, TensorDict]:
        loss, agent = make_replay_loss(kind, cell, memory, backend, n_steps=2)
        loss.double()
        return loss, collect(agent, 4, 9, 1, dtype=torch.float64)[0]

    return make


LOSSES = {
    "PPO": ppo,
    "PPO, tanh": lambda *args: ppo(*args, "tanh"),
    "PPO, one-hot": lambda *args: ppo(*args, "one_hot"),
    "A2C": lambda *args: gradient(*args, A2CLoss),
    "REINFORCE": lambda *args: gradient(*args, ReinforceLoss, loss_critic_type="l2"),
    "DQN": dqn,
    "DQN, no target network": lambda *args: dqn(*args, delay_value=False, value_rescaling=True),
    "SAC": replay("sac", "own"),
    "SAC, shared memory": replay("sac", "shared"),
    "discrete SAC": replay("discrete sac", "both"),
    "TD3": replay("td3", "both"),
}


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("cell", ["lstm", "none"])
@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_derivatives_forwards_are_those_of_reverse(make: Callable, cell: str, with_gradients: bool) -> None:
    """Compare derivatives by all parameters at once. Targets are constants in both."""
    loss, batch = make(cell, "loop")
    parameters = {name: p for name, p in loss.named_parameters() if p.requires_grad}
    tangents = {name: torch.randn_like(value) for name, value in parameters.items()}
    gradients = torch.autograd.grad(total(loss, batch), list(parameters.values()))
    expected = sum((g * t).sum() for g, t in zip(gradients, tangents.values(), strict=True))
    primals = {name: value.detach() for name, value in parameters.items()}

    def function(values: dict[str, Tensor]) -> Tensor:
        losses = functional_call(loss, values, (batch,))
        return sum((value for key, value in losses.items() if key.startswith("loss")), torch.zeros(()))

    with torch.set_grad_enabled(with_gradients):
        torch.testing.assert_close(jvp(function, (primals,), (tangents,))[1], expected, rtol=1e-9, atol=1e-12)
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(value, tangents[name]) for name, value in primals.items()}
            torch.testing.assert_close(forward_ad.unpack_dual(function(duals)).tangent, expected, rtol=1e-9, atol=1e-12)


def test_advantages_are_constants_forwards_too() -> None:
    agent = make_agent("gru", True, "loop")
    agent.step.double()
    batch = collect(agent, 4, 9, 1, dtype=torch.float64)[0]
    with forward_ad.dual_level():
        parameters = {name: forward_ad.make_dual(p, p) for name, p in agent.critic.named_parameters()}
        for differentiable in (False, True):
            gae = GAE(0.9, 0.9, agent.critic, differentiable=differentiable)
            out = functional_call(gae, {f"value_network.{n}": p for n, p in parameters.items()}, (batch.clone(),))
            for key in ("advantage", "value_target", "state_value"):
                assert (forward_ad.unpack_dual(out[key]).tangent is not None) == differentiable, key


@contextmanager
def no_collection() -> Generator[None]:
    gc.disable()
    gc.freeze()  # existing entries are ignored
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def live_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pad", "loop", "cpu", "scan"])
@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_no_tensor_outlives_its_loss(make: Callable, backend: str) -> None:
    loss, batch = make("gru", backend)

    def update() -> None:
        if isinstance(loss, PolicyGradientLoss):
            GAE(0.9, 0.9, loss.critic_network)(batch.clone())
            VTrace(0.9, loss.actor_network, loss.critic_network)(batch.clone())
        total(loss, batch).backward()
        loss.zero_grad()

    update()
    with no_collection():
        before = live_tensors()
        for _ in range(5):
            update()
        assert live_tensors() == before
        total(loss, batch)  # a graph without a backward pass
        assert live_tensors() == before


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_batches_without_tokens_are_refused(make: Callable) -> None:
    loss, batch = make("gru", "loop")
    for empty in (batch[:0], batch[:, :0], batch.reshape(-1)[:0]):
        with pytest.raises(ArgumentError, match=r"needs a batch with at least one token, got shape \[.*0.*\]"):
            loss(empty)


@pytest.mark.parametrize("average", [False, True])
def test_advantages_of_no_tokens(average: bool) -> None:
    loss, batch = ppo("gru", "loop")
    for empty in (batch[:0], batch[:, :0], batch.reshape(-1)[:0]):
        out = GAE(0.9, 0.9, loss.critic_network, average_gae=average)(empty.clone())
        assert out["advantage"].shape == (*empty.shape, 1)


def poison(batch: TensorDict, where: Tensor, value: float) -> TensorDict:
    """Return a copy of ``batch`` with all numbers at the tokens ``where`` set to ``value``."""
    return batch.apply(
        lambda entry: (
            entry.masked_fill(where.reshape(*where.shape, *(1,) * (entry.ndim - where.ndim)), value)
            if entry.is_floating_point()
            else entry.clone()
        )
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("cell", ["lstm", "none"])
@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_tokens_that_do_not_count_may_hold_anything(make: Callable, cell: str, value: float) -> None:
    """Losses, errors and gradients are those of the batch without them."""
    loss, batch = make(cell, "loop")
    parameters = [parameter for parameter in loss.parameters() if parameter.requires_grad]

    def run(batch: TensorDict) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        losses = loss(batch)
        values = sum((value for key, value in losses.items() if key.startswith("loss")), torch.zeros(()))
        return {key: v.detach() for key, v in losses.items()}, torch.autograd.grad(values, parameters)

    expected, gradients = run(batch[:, :6])
    counts = torch.zeros(batch.shape, dtype=torch.bool)
    counts[:, :6] = True
    sick = poison(batch, ~counts, value)
    sick["collector", "mask"] = counts
    before = sick.clone()
    for padded in (sick, sick.reshape(-1)):
        found, same = run(padded)
        for key, number in expected.items():
            ours = found[key][padded["collector", "mask"]].reshape(number.shape) if number.ndim else found[key]
            torch.testing.assert_close(ours, number, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(same, gradients, rtol=1e-9, atol=1e-12)
    for key in before.keys(True, True):
        torch.testing.assert_close(sick[key], before[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cell", ["gru", "none"])
def test_advantages_whatever_the_padding_holds(cell: str) -> None:
    loss, batch = ppo(cell, "loop")
    parameters = list(loss.critic_network.parameters())
    gae = GAE(0.9, 0.9, loss.critic_network, average_gae=True, differentiable=True)
    expected = gae(batch[:, :6].clone())
    counts = torch.zeros(batch.shape, dtype=torch.bool)
    counts[:, :6] = True
    sick = poison(batch, ~counts, torch.nan)
    sick["collector", "mask"] = counts
    found = gae(sick.clone())
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(found[key][:, :6], expected[key])
        assert found[key][:, 6:].count_nonzero() == 0
        ours, theirs = (
            torch.autograd.grad(out[key].square().sum(), parameters, retain_graph=True) for out in (found, expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", ["pad", "loop", "cpu", "scan"])
@pytest.mark.parametrize("cell", ["lstm", "none"])
def test_a_trajectory_reaches_no_other(cell: str, backend: str, value: float) -> None:
    """Affects observations, rewards, states and next observations."""
    loss, batch = ppo(cell, backend)
    for flat in (batch, batch.reshape(-1)):
        ids = flat["collector", "traj_ids"].reshape(flat.shape)
        for trajectory in ids.unique()[[0, 2, -1]]:
            here = ids == trajectory
            sick, clean = poison(flat, here, value), flat.clone()
            for out in (sick, clean):
                GAE(0.9, 0.9, loss.critic_network)(out)
            for key in ("advantage", "value_target", "state_value", ("next", "state_value")):
                torch.testing.assert_close(sick[key][~here], clean[key][~here], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"delay_value": False, "value_rescaling": True}], ids=str)
@pytest.mark.parametrize("backend", ["pad", "loop", "cpu", "scan"])
def test_an_error_is_that_of_its_trajectory(backend: str, options: dict) -> None:
    loss, batch = dqn("gru", backend, **options)
    for flat in (batch, batch.reshape(-1)):
        ids = flat["collector", "traj_ids"].reshape(flat.shape)
        here = ids == ids.unique()[2]
        found, clean = (loss(data)["td_error"] for data in (poison(flat, here, torch.nan), flat))
        torch.testing.assert_close(found[~here], clean[~here], rtol=1e-12, atol=1e-12)
        assert found[here].isnan().all()
