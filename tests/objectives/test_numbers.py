"""What holds of the numbers of every loss."""

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

from recurl.errors import ArgumentError
from recurl.objectives import ClipPPOLoss, DQNLoss, LossModule
from recurl.objectives.value import GAE
from tests.objectives.simulate import collect, make_agent
from tests.objectives.test_dqn import make_loss


def ppo(cell: str, backend: str, kind: str = "categorical", **options: object) -> tuple[ClipPPOLoss, TensorDict]:
    agent = make_agent(cell, True, backend, kind)
    agent.step.double()
    batch = collect(agent, 4, 9, 1, dtype=torch.float64)[0]
    batch = GAE(gamma=0.9, lmbda=0.9, value_network=agent.critic)(batch)
    batch["action_log_prob"] = batch["action_log_prob"] + 0.3 * torch.randn_like(batch["action_log_prob"])
    return ClipPPOLoss(agent.actor, agent.critic, clip_value=0.1, **options), batch


def dqn(cell: str, backend: str, **options: object) -> tuple[DQNLoss, TensorDict]:
    loss, agent = make_loss(cell, backend=backend, n_steps=2, double_dqn=True, **options)
    return loss, collect(agent, 4, 9, 1, dtype=torch.float64)[0]


def total(loss: LossModule, batch: TensorDict) -> Tensor:
    return sum((value for key, value in loss(batch).items() if key.startswith("loss")), torch.zeros(()))


LOSSES = {
    "PPO": ppo,
    "PPO, tanh": lambda *args: ppo(*args, "tanh"),
    "PPO, one-hot": lambda *args: ppo(*args, "one_hot"),
    "DQN": dqn,
    "DQN, no target network": lambda *args: dqn(*args, delay_value=False, value_rescaling=True),
}


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("cell", ["lstm", "none"])
@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_derivatives_forwards_are_those_of_reverse(make: Callable, cell: str, with_gradients: bool) -> None:
    """By all parameters at once. Targets are constants in both."""
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
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("backend", ["pad", "loop", "cpu", "scan"])
@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_no_tensor_outlives_its_loss(make: Callable, backend: str) -> None:
    loss, batch = make("gru", backend)

    def update() -> None:
        if isinstance(loss, ClipPPOLoss):
            GAE(0.9, 0.9, loss.critic_network)(batch.clone())
        total(loss, batch).backward()
        loss.zero_grad()

    update()
    with no_collection():
        before = live_tensors()
        for _ in range(5):
            update()
        assert live_tensors() == before
        total(loss, batch)  # a graph that no one walks back
        assert live_tensors() == before


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_batches_without_tokens_are_refused(make: Callable) -> None:
    loss, batch = make("gru", "loop")
    for empty in (batch[:0], batch[:, :0], batch.reshape(-1)[:0]):
        with pytest.raises(ArgumentError, match=r"mean over tokens, but the batch, of shape \[.*0.*\], has none"):
            loss(empty)


@pytest.mark.parametrize("average", [False, True])
def test_advantages_of_no_tokens(average: bool) -> None:
    loss, batch = ppo("gru", "loop")
    for empty in (batch[:0], batch[:, :0], batch.reshape(-1)[:0]):
        out = GAE(0.9, 0.9, loss.critic_network, average_gae=average)(empty.clone())
        assert out["advantage"].shape == (*empty.shape, 1)
