"""Policies whose outputs differ between calls: dropout, other noise, internal state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn
from torch.nn import functional as F

from recurl.collectors import Collector
from recurl.diagnostics import check_batch, check_repeat
from recurl.modules import ValueOperator
from tests.diagnostics.policies import (
    CELLS,
    actor_of,
    critic_memory,
    each_cell,
    failures,
    linear,
    make_env,
    memory,
    refused,
    wired,
)

pytestmark = pytest.mark.slow

EVAL = "call policy.eval() before collection and for the losses"


def encoded(layer: Any, cell: str = "gru") -> nn.Module:
    return actor_of(Mod(layer, ["observation"], ["x"]), memory(cell, "x"), linear())


@pytest.mark.parametrize(("cell", "rows"), each_cell([None, 1, 3]))
def test_dropout_in_the_encoder(cell: str, rows: int | None) -> None:
    policy = encoded(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)), cell)
    result = refused(policy, wired(policy, rows), "repeat")
    assert "the Dropout 'module.0.module.0.module.1' draws random numbers" in result.detail
    assert EVAL in result.fix
    assert failures(policy.eval(), wired(policy, rows)) == []


@pytest.mark.parametrize("cell", each_cell())
def test_dropout_between_layers(cell: str) -> None:
    module = CELLS[cell](4, 8, num_layers=2, dropout=0.3, in_key="observation", out_key="features")
    policy = actor_of(module, linear())
    result = refused(policy, wired(policy), "repeat")
    assert f"the {type(module).__name__} 'module.0.module.0' draws random numbers" in result.detail
    assert EVAL in result.fix


def test_dropout_in_a_head_in_a_critic_and_without_memory() -> None:
    dropout = nn.Sequential(nn.AlphaDropout(0.3), nn.Linear(8, 1))
    head = Mod(nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 2)), ["features"], ["logits"])
    actor = actor_of(memory(), linear())
    for policy in (
        actor_of(memory(), head),
        actor_of(Mod(nn.Linear(4, 8), ["observation"], ["features"]), head),
        Seq(actor, critic_memory(), ValueOperator(dropout, ["of_critic"])),
    ):
        result = refused(policy, wired(policy), "repeat")
        assert "Dropout" in result.detail
        assert EVAL in result.fix


class Drawing(nn.Module):
    """Policy in a single module that chooses from features with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.3), nn.Linear(8, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=self.layer(self.drop(features))).sample()


def test_dropout_in_modules_that_may_draw() -> None:
    policy = Seq(memory(), Mod(Drawing(), ["features"], ["action"]))
    assert "the Dropout 'module.1.module.drop'" in refused(policy, wired(policy), "repeat").detail


def test_dropout_that_no_module_holds() -> None:
    policy = encoded(nn.Dropout(0.3))
    assert "the Dropout" in refused(lambda td: policy(td), wired(policy), "repeat").detail
    drop = nn.Dropout(0.3)
    policy = encoded(lambda x: drop(x))
    assert "the Dropout" in refused(policy, wired(policy), "repeat").detail


class Skipping(nn.Module):
    """Stochastic depth, sampled with Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x) if self.training and random.random() < 0.5 else x


class Noisy(nn.Module):
    """Module that adds noise from its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.generator)


NOISE = {
    "torch": lambda x: x + torch.randn_like(x),
    "numpy": lambda x: x + torch.as_tensor(np.random.normal(size=tuple(x.shape)), dtype=x.dtype),  # noqa: NPY002 - the legacy generator
    "functional": lambda x: F.dropout(x, 0.3),
    "own": Noisy(),
    "python": Skipping(),
    "rrelu": nn.RReLU(),
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
def test_noise(noise: Any) -> None:
    policy = encoded(noise)
    result = refused(policy, wired(policy), "repeat")
    assert "'x' for the same steps differs between calls" in result.detail
    only_in_training = isinstance(noise, Skipping | nn.RReLU)
    assert (EVAL if only_in_training else "sample it once per batch instead of in forward") in result.fix
    if not only_in_training:
        assert refused(policy.eval(), wired(policy), "repeat")


def test_drawn_logits() -> None:
    policy = actor_of(memory(), linear(), Mod(lambda x: F.gumbel_softmax(x).log(), ["logits"], ["logits"]))
    assert "'logits' for the same steps differs between calls" in refused(policy, wired(policy), "repeat").detail


# -- internal state of a policy


class HiddenState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.cell(x, self.state)
        return self.state


class Statistics(nn.Module):
    """Module that averages all its inputs so far, in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.count = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.mean += (x.reshape(-1, 4).mean(0) - self.mean) / self.count
        return x - self.mean


@pytest.mark.parametrize("layer", [HiddenState, Statistics])
@pytest.mark.parametrize("with_memory", [False, True])
def test_hidden_states(layer: type[nn.Module], with_memory: bool) -> None:
    hidden = layer()
    policy = encoded(hidden) if with_memory else actor_of(Mod(hidden, ["observation"], ["x"]), linear(4, "x"))
    result = refused(policy, wired(policy), "repeat")
    assert "keeps internal state" in result.detail
    if layer is Statistics:
        assert EVAL in result.fix
        assert float(hidden.count) == 1  # not from the checks, which restore the policy
        assert failures(policy.eval(), wired(policy)) == []
    else:
        assert "use LSTMModule, GRUModule or CellModule" in result.fix
        assert "ObservationNorm" in result.fix
        assert hidden.state is None


def test_comparing_checks_are_skipped() -> None:
    policy = encoded(nn.Dropout(0.5))
    batch = Collector(make_env(2), policy, frames_per_batch=40).collect()
    assert [result.name for result in check_batch(policy, batch)] == ["is_init", "traj_ids", "mode", "repeat", "rows"]
    assert "training mode" not in check_repeat(policy, batch).detail
    result = check_repeat(policy.eval(), batch)
    assert result.passed
    assert result.detail.endswith("in evaluation mode")
