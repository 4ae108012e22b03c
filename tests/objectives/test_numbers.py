"""What holds of the numbers of every loss."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

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
