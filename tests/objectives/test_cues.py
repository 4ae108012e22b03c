"""The gradient of a loss reaches a cue a hundred steps back, and nothing beyond the beginning of its sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from recurl.data import SequenceMinibatches
from recurl.objectives import A2CLoss, ClipPPOLoss, ReinforceLoss
from recurl.objectives.value import VTrace
from tests.objectives.simulate import collect, make_agent

STEPS = 101


def only_the_last_counts(cell: str, shared: bool, backend: str) -> tuple[Any, TensorDict]:
    agent = make_agent(cell, shared, backend)
    agent.step.double()
    batch = collect(agent, 2, STEPS, 1, end=0.0)[0]
    batch["advantage"] = batch["value_target"] = torch.zeros(2, STEPS, 1, dtype=torch.float64)
    batch["advantage"][:, -1] = 1.0
    batch["observation"].requires_grad_()
    return agent, batch


def slope(batch: TensorDict, loss: torch.Tensor) -> torch.Tensor:
    """Return the magnitude of the gradient at every observation, ``[B, T]``."""
    (gradient,) = torch.autograd.grad(loss, batch["observation"])
    return gradient.abs().sum(-1)


@pytest.mark.parametrize(("cell", "shared", "backend"), [("lstm", True, "cpu"), ("gru", False, "loop")])
@pytest.mark.parametrize("kind", [A2CLoss, ReinforceLoss, ClipPPOLoss])
def test_losses(kind: Callable, cell: str, shared: bool, backend: str) -> None:
    agent, batch = only_the_last_counts(cell, shared, backend)
    loss = kind(agent.actor, agent.critic)
    name = loss.out_keys[0]
    assert (slope(batch, loss(batch)[name]) > 0).all()
    batch["is_init"] = batch["is_init"].clone()
    batch["is_init"][:, 40] = True
    found = slope(batch, loss(batch)[name])
    assert (found[:, 40:] > 0).all()
    assert found[:, :40].count_nonzero() == 0
    whole, *_ = SequenceMinibatches(batch, 1)
    assert (slope(batch, loss(whole)[name])[:, 40:] > 0).all()
    cut, *_ = SequenceMinibatches(batch, 1, 50)
    found = slope(batch, loss(cut)[name])
    assert (found[:, 100:] > 0).all()
    assert found[:, :100].count_nonzero() == 0


@pytest.mark.parametrize(("cell", "shared", "backend"), [("lstm", True, "cpu"), ("gru", False, "loop")])
def test_vtrace(cell: str, shared: bool, backend: str) -> None:
    """The target of the last token."""
    agent, batch = only_the_last_counts(cell, shared, backend)
    estimator = VTrace(0.9, agent.actor, agent.critic, 2.0, 2.0, differentiable=True)
    assert (slope(batch, estimator(batch.copy())["value_target"][:, -1].sum()) > 0).all()
    batch["is_init"] = batch["is_init"].clone()
    batch["is_init"][:, 40] = True
    found = slope(batch, estimator(batch.copy())["value_target"][:, -1].sum())
    assert (found[:, 40:] > 0).all()
    assert found[:, :40].count_nonzero() == 0
