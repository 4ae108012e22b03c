"""Log-probabilities that losses don't reproduce."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModuleBase
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import distributions as d
from torch import nn

from recurl.collectors import Collector
from recurl.core.specs import Categorical
from recurl.diagnostics import CheckResult, check_log_prob
from recurl.modules import EGreedyModule, NormalParamExtractor, OneHotCategorical
from recurl.sequences.mode import ExplorationType, exploration_type, recurrent_mode
from tests.diagnostics.policies import (
    RealActions,
    actor_of,
    each_cell,
    failures,
    linear,
    make_env,
    memory,
    refused,
    wired,
)

pytestmark = pytest.mark.slow

KEY = "action_log_prob"
AFTERWARDS = "don't modify an action, its distribution or its log-probability once they are written"


def behind(actor: nn.Module, keys: list[str], change: object) -> Seq:
    return Seq(actor, Mod(change, keys, keys[:1]))


@pytest.mark.parametrize(("cell", "rows"), each_cell([None, 3]))
def test_another_action(cell: str, rows: int | None) -> None:
    policy = behind(actor_of(memory(cell), linear()), ["action"], torch.ones_like)
    result = refused(policy, wired(policy, rows), "log_prob")
    assert f"{KEY} as collected and recomputed step by step differ" in result.detail
    assert AFTERWARDS in result.fix


def test_actions_clipped_or_redrawn_after_the_sampler() -> None:
    parameters = nn.Sequential(nn.Linear(8, 4), NormalParamExtractor())
    head = Mod(parameters, ["features"], ["loc", "scale"])
    normal = actor_of(memory(), head, in_keys=["loc", "scale"], distribution_class=d.Normal)
    clipped = behind(normal, ["action"], lambda action: action.clamp(-0.2, 0.2))
    assert AFTERWARDS in refused(clipped, wired(clipped, 2, RealActions), "log_prob").fix
    sure = Mod(nn.Sequential(nn.Linear(8, 2), nn.Hardtanh(-5, 5)), ["features"], ["logits"])
    explored = Seq(actor_of(memory(), sure), EGreedyModule(Categorical(2), 1.0, 1.0))
    assert AFTERWARDS in refused(explored, wired(explored), "log_prob").fix


def test_another_log_probability() -> None:
    actor = actor_of(memory(), linear())
    halved = behind(actor, [KEY], lambda value: value / 2)

    def sharp(_: torch.Tensor, logits: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return (2 * logits).log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    sharper = behind(actor, [KEY, "logits", "action"], sharp)
    for policy in (halved, sharper):
        assert AFTERWARDS in refused(policy, wired(policy), "log_prob").fix


class Warmer(nn.Module):
    """Module with a temperature for exploration."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return 3 * logits if exploration_type() is ExplorationType.RANDOM else logits


@pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
def test_a_distribution_that_depends_on_the_exploration_type(kind: ExplorationType) -> None:
    policy = actor_of(memory(), linear(), Mod(Warmer(), ["logits"], ["logits"]), default_interaction_type=kind)
    result = refused(policy, wired(policy), "log_prob")
    assert "as computed in a loss, without an exploration type, differ" in result.detail
    assert "independent of exploration_type()" in result.fix


class OwnActor(TensorDictModuleBase):
    """Module that samples by itself, and whose distribution for losses differs on sequences."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.layer, self.wrong = nn.Linear(8, 2), wrong
        self.in_keys, self.out_keys = ["features"], ["action", KEY]

    def get_dist(self, td: TensorDictBase) -> d.Distribution:
        sharp = 3 if self.wrong and recurrent_mode() else 1
        return d.Categorical(logits=sharp * self.layer(td["features"]))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        distribution = self.get_dist(td)
        action = distribution.sample()
        return td.set("action", action).set(KEY, distribution.log_prob(action))


def test_an_actor_of_ones_own() -> None:
    policy = Seq(memory(), OwnActor(wrong=True))
    result = refused(policy, wired(policy), "log_prob")
    assert f"{KEY} as collected and as replayed differ" in result.detail
    assert "for steps [N] and for sequences [*B, T]" in result.fix
    policy = Seq(memory(), OwnActor(wrong=False))
    assert failures(policy, wired(policy)) == []


def checked(policy: nn.Module, spoil: float = 0.0, key: str = KEY) -> CheckResult:
    batch = Collector(make_env(2), policy, frames_per_batch=40).collect()
    if spoil:
        batch[key] += spoil
    return check_log_prob(policy, batch)


def test_the_collected_log_probs_are_compared() -> None:
    sampler = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=d.Categorical, return_log_prob=True, log_prob_key="mine"
    )
    plain = ProbabilisticTensorDictSequential(memory(), linear(), sampler)
    for policy, key in (
        (actor_of(memory("lstm"), linear(), distribution_class=OneHotCategorical), KEY),
        (actor_of(linear(4, "observation")), KEY),
        (plain, "mine"),
    ):
        result = checked(policy)
        assert result.passed
        assert result.detail.startswith(f"{key} recomputed: difference")
        result = checked(policy, 0.1, key)
        assert not result.passed
        assert result.detail.startswith(f"{key} as collected and recomputed")
        assert "check with the weights used for collection" in result.fix


def test_nothing_to_compare() -> None:
    choice = Mod(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    for policy in (Seq(memory(), linear(), choice), actor_of(memory(), linear(), return_log_prob=False)):
        assert "nothing to compare" in checked(policy).detail
