"""Correct policies with all ways of choosing an action: none fails any check."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
)
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import distributions as d
from torch import nn

from recurl.core.specs import Categorical, OneHot, TensorSpec, Unbounded
from recurl.envs import EnvBase, InitTracker, TensorDictPrimer
from recurl.modules import (
    EGreedyModule,
    NormalParamExtractor,
    OneHotCategorical,
    QValueActor,
    TanhNormal,
    ValueOperator,
    get_primers_from_module,
)
from recurl.sequences.mode import ExplorationType, exploration_type
from tests.diagnostics.policies import RealActions, actor_of, critic_memory, failures, linear, make_env, memory, wired

pytestmark = pytest.mark.slow

Make = Callable[[], Any]
SOUND: dict[str, Make] = {}


def sound(make: Make) -> Make:
    """Return a policy, or a policy and a function that creates its environment for a number of rows."""
    SOUND[make.__name__] = make
    return make


# -- kinds of actions


def wired_for(policy: nn.Module) -> Callable[[int | None], EnvBase]:
    return lambda rows: wired(policy, rows, RealActions)


def location_and_scale() -> Mod:
    return Mod(nn.Sequential(nn.Linear(8, 4), NormalParamExtractor()), ["features"], ["loc", "scale"])


def independent(loc: torch.Tensor, scale: torch.Tensor) -> d.Distribution:
    return d.Independent(d.Normal(loc, scale), 1)


def squashed(loc: torch.Tensor, scale: torch.Tensor) -> d.Distribution:
    return d.TransformedDistribution(independent(loc, scale), [d.TanhTransform(cache_size=1)])


def beta(loc: torch.Tensor, scale: torch.Tensor) -> d.Distribution:
    return d.Independent(d.Beta(loc.exp(), scale + 1), 1)  # the number of random draws depends on its parameters


@pytest.mark.parametrize("kind", [TanhNormal, d.Normal, independent, squashed, beta], ids=lambda kind: kind.__name__)
def test_real_actions(kind: Any) -> None:
    torch.manual_seed(0)
    policy = actor_of(memory("lstm"), location_and_scale(), in_keys=["loc", "scale"], distribution_class=kind)
    assert failures(policy, wired_for(policy)(2)) == []


@sound
def one_hot() -> Any:
    return actor_of(memory(), linear(), distribution_class=OneHotCategorical)


@sound
def plain_tensordict() -> Any:
    options = {"distribution_class": independent, "return_log_prob": True, "log_prob_key": "mine", "generator": 3}
    sampler = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], **options)
    policy = ProbabilisticTensorDictSequential(memory(), location_and_scale(), sampler)
    return policy, wired_for(policy)


@sound
def composite() -> Any:
    options = {"distribution_kwargs": {"distribution_map": {"action": d.Categorical}}, "return_log_prob": True}
    sampler = ProbabilisticTensorDictModule(["params"], distribution_class=CompositeDistribution, **options)
    head = Mod(nn.Linear(8, 2), ["features"], [("params", "action", "logits")])
    return ProbabilisticTensorDictSequential(memory(), head, sampler)


@sound
def masked() -> Any:
    may = Mod(lambda x: torch.stack([x[..., 0] > -1, x[..., 0] < torch.inf], -1), ["observation"], ["may"])
    return actor_of(may, memory(), linear(), in_keys={"logits": "logits", "mask": "may"})


@sound
def deterministic_and_saturated() -> Any:
    layer = nn.Linear(8, 2)
    nn.init.constant_(layer.bias, 50.0)
    policy = Seq(memory(), Mod(nn.Sequential(layer, nn.Tanh()), ["features"], ["action"]))
    return policy, wired_for(policy)


class Noise(nn.Module):
    """Module that adds noise to actions, from its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, action: torch.Tensor) -> torch.Tensor:
        return (action + 0.1 * torch.randn(action.shape, generator=self.generator)).clamp(-1, 1)


@sound
def noise_on_actions() -> Any:
    policy = Seq(memory(), Mod(nn.Sequential(nn.Linear(8, 2), nn.Tanh(), Noise()), ["features"], ["action"]))
    return policy, wired_for(policy)


# -- action values and exploration


def values(*modules: nn.Module, spec: TensorSpec) -> QValueActor:
    return QValueActor(Seq(*modules, Mod(nn.Linear(8, 2), ["features"], ["action_value"])), spec=spec)


@pytest.mark.parametrize("spec", [Categorical(2), OneHot(2)], ids=["integers", "one_hot"])
@pytest.mark.parametrize("eps", [1.0, 0.0])
def test_action_values(spec: TensorSpec, eps: float) -> None:
    policy = Seq(values(memory(), spec=spec), EGreedyModule(spec, eps, 0.0))
    assert failures(policy, wired(policy)) == []


class EpsilonGreedy(nn.Module):
    """Typical user code: random numbers from any library, and decreasing exploration."""

    def __init__(self, draw: Callable[[], float] | np.random.Generator) -> None:
        super().__init__()
        self.draw, self.calls = draw, 0

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        draw = self.draw.random() if isinstance(self.draw, np.random.Generator) else self.draw()
        best = q.argmax(-1)
        return torch.randint_like(best, 2) if draw < 0.99**self.calls else best


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.default_rng(0)], ids=["py", "np", "own"])
@pytest.mark.parametrize("in_one", [False, True])
def test_exploration_of_ones_own(draw: Any, in_one: bool) -> None:
    head, explore = nn.Linear(8, 2), EpsilonGreedy(draw)
    if in_one:
        policy = Seq(memory(), Mod(nn.Sequential(head, explore), ["features"], ["action"]))
    else:
        policy = Seq(memory(), Mod(head, ["features"], ["q"]), Mod(explore, ["q"], ["action"]))
    assert failures(policy, wired(policy)) == []


class Perturbed(nn.Module):
    """Module that adds noise to the action values, only when collectors explore."""

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return q + torch.randn_like(q) if exploration_type() is ExplorationType.RANDOM else q


@sound
def perturbed_values() -> Any:
    head = Mod(nn.Sequential(nn.Linear(8, 2), Perturbed()), ["features"], ["action_value"])
    return QValueActor(Seq(memory(), head), spec=Categorical(2))


class Remembering(TensorDictModuleBase):
    """Module that carries the action as a state."""

    in_keys, out_keys = ["action"], [("next", "previous")]

    def forward(self, td: Any) -> Any:
        return td.set(("next", "previous"), td["action"].unsqueeze(-1).float())


@pytest.mark.parametrize("kind", ["actor", "values"])
def test_previous_action_as_a_state(kind: str) -> None:
    keys = ["observation", "previous", "is_init"]
    joined = Mod(lambda x, action, init: torch.cat([x, action.masked_fill(init, 0.0)], -1), keys, ["x"])
    parts = joined, memory("gru", "x", 5)
    if kind == "actor":
        policy = Seq(actor_of(*parts, linear()), Remembering())
    else:
        policy = Seq(values(*parts, spec=Categorical(2)), EGreedyModule(Categorical(2), 0.5), Remembering())
    primers = get_primers_from_module(policy), TensorDictPrimer(previous=Unbounded(1))
    assert failures(policy, make_env(3, InitTracker(), *primers)) == []


class Correlated(TensorDictModuleBase):
    """Correlated noise that is carried between steps as a state."""

    in_keys, out_keys = ["action", "noise", "is_init"], ["action", ("next", "noise")]

    def forward(self, td: Any) -> Any:
        noise = 0.9 * td["noise"].masked_fill(td["is_init"], 0.0) + 0.1 * torch.randn_like(td["noise"])
        return td.set("action", (td["action"] + noise).clamp(-1, 1)).set(("next", "noise"), noise)


def test_noise_as_a_state() -> None:
    head = Mod(nn.Sequential(nn.Linear(8, 2), nn.Tanh()), ["features"], ["action"])
    policy = Seq(memory(), head, Correlated())
    primers = get_primers_from_module(policy), TensorDictPrimer(noise=Unbounded(2))
    assert failures(policy, make_env(2, InitTracker(), *primers, kind=RealActions)) == []


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 1)

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat(parts, -1))


@sound
def critic_of_actions() -> Any:
    actor = actor_of(memory(), location_and_scale(), in_keys=["loc", "scale"], distribution_class=TanhNormal)
    policy = Seq(actor, critic_memory(), ValueOperator(Joined(), ["of_critic", "action"]))
    return policy, wired_for(policy)


@pytest.mark.parametrize(("make", "rows"), list(zip(SOUND.values(), cycle([2, None]), strict=False)), ids=SOUND.keys())
def test_sound(make: Make, rows: int | None) -> None:
    torch.manual_seed(0)
    made = make()
    policy, env = (made[0], made[1](rows)) if isinstance(made, tuple) else (made, wired(made, rows))
    assert [str(failure) for failure in failures(policy, env)] == []
