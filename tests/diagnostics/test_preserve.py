"""Experiments leave the policy and all random number generators unchanged."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from torch import nn

from recurl.collectors import Collector
from recurl.diagnostics import check_batch, check_wiring
from recurl.diagnostics.experiment import require_close
from recurl.diagnostics.preserve import evaluating, other_weights, preserved, rounded_weights
from recurl.diagnostics.result import Fault
from tests.diagnostics.policies import actor_of, linear, make_env, memory, wired, zero


class Holding(nn.Module):
    """Module with attributes of many kinds, which change in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.mean, self.calls = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.seen, self.last, self.by_name, self.count = deque([1], 3), torch.full((4,), torch.nan), {"a": 1}, 0
        self.in_list = [torch.zeros(4)]
        self.own, self.rng, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean += 1
        self.calls = self.calls + 1
        self.seen.append(self.count)
        self.last.fill_(1.0)
        self.in_list[0] += 1
        self.by_name[f"{self.count}"] = 2
        self.count, self.new = self.count + 1, 3
        noise = self.rng.random() + self.python.random() + random.random() + np.random.rand()  # noqa: NPY002 - used as well
        return self.drop(self.layer(x)) + noise + torch.rand(4, generator=self.own)


def generators(holding: Holding) -> list[Any]:
    legacy = np.random.get_state()  # noqa: NPY002 - the global generator
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        [*legacy[:1], legacy[1].tolist(), *legacy[2:]],
        holding.own.get_state().tolist(),
        holding.rng.bit_generator.state,
        holding.python.getstate(),
    ]


def contents(policy: nn.Module, holding: Holding) -> list[Any]:
    return [
        {name: value.clone() for name, value in policy.state_dict().items()},
        [module.training for module in policy.modules()],
        [sorted(vars(module)) for module in policy.modules()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in policy.modules()],
        [parameter.data_ptr() for parameter in policy.parameters()],
        [parameter._version for parameter in policy.parameters()],
        copy.deepcopy([holding.seen, holding.by_name, holding.count]),
        holding.last.isnan().all(),
        holding.in_list[0].any(),
        [module.default_interaction_type for module in policy.modules() if hasattr(module, "default_interaction_type")],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrapped", [False, True])
def test_everything_is_restored(wrapped: bool, training: bool) -> None:
    holding = Holding()
    policy = actor_of(Mod(holding, ["observation"], ["x"]), memory("gru", "x"), linear()).train(training)
    policy[1].eval()  # modes may differ between parts
    env, batch = wired(policy), Collector(make_env(2), policy, frames_per_batch=40).collect()
    before, drawn = contents(policy, holding), generators(holding)
    given = (lambda td: policy(td)) if wrapped else policy
    assert not all(result.passed for result in check_wiring(given, env))
    check_batch(given, batch)
    after = contents(policy, holding)
    weights, same = after.pop(0), before.pop(0)
    assert after == before
    assert all(torch.equal(weights[name], same[name]) for name in same)
    assert generators(holding) == drawn


def test_also_when_the_policy_raises() -> None:
    holding = Holding()
    before = generators(holding)
    with (
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        preserved(holding),
        other_weights(holding, 0),
    ):
        holding(torch.zeros(5))
    assert generators(holding) == before
    assert holding.count == 0
    assert not holding.mean.any()
    assert type(holding.layer.weight) is nn.Parameter


def test_one_seed_draws_the_same_everywhere() -> None:
    holding = Holding()

    def draw(seed: int) -> torch.Tensor:
        with preserved(holding, seed):
            return holding(torch.zeros(4))

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_other_weights() -> None:
    layer = zero(nn.Linear(4, 4))
    tied = nn.Sequential(layer, nn.BatchNorm1d(4), layer)
    with other_weights(tied, 0):
        assert tied[0].weight.all()
        assert tied[2].weight is tied[0].weight
        assert (tied[1].running_var > 0).all()
        assert (tied[1].num_batches_tracked == 0).all()
    assert not layer.weight.any()
    assert tied[2].weight is layer.weight


def test_rounded_weights() -> None:
    layer = nn.Linear(4, 4)
    before = layer.weight
    with rounded_weights(layer, 0):
        change = ((layer.weight - before) / before).abs()
        assert 0 < change.max() < 1e-6
        assert layer.weight is not before
    assert layer.weight is before


@pytest.mark.parametrize(
    ("gap", "rounding", "dtype", "passes"),
    [
        (5e-5, 0, torch.float32, True),
        (5e-4, 1e-4, torch.float32, True),
        (5e-4, 1e-6, torch.float32, False),
        (0.1, 1.0, torch.float32, False),
        (torch.nan, 1e-4, torch.float32, False),
        (1e-6, 1e-6, torch.float64, True),
        (0.1, 1.0, torch.bfloat16, False),
    ],
)
def test_differences_are_tolerated_that_rounding_makes(
    gap: float, rounding: float, dtype: torch.dtype, passes: bool
) -> None:
    expected = torch.ones(4, dtype=dtype)
    seen, at = expected + gap, torch.ones(4, dtype=torch.bool)
    compared = "x", seen, expected, at, "fix", lambda seed: seen + (rounding if seed == 1 else 0)
    if passes:
        assert require_close(*compared) == pytest.approx(gap, rel=0.01)
    else:
        with pytest.raises(Fault, match="differ by"):
            require_close(*compared)


def test_evaluating() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    with evaluating(lambda x: net(x)):
        assert not any(module.training for module in net.modules())
    assert [module.training for module in net.modules()] == [True, True, False]
