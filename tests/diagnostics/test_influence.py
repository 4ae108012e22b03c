"""Heads that never read the memory, in various policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector
from recurl.core.specs import Categorical
from recurl.diagnostics import check_action
from recurl.modules import (
    ActorValueOperator,
    EGreedyModule,
    NormalParamExtractor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from tests.diagnostics.policies import (
    RealActions,
    actor_of,
    critic_memory,
    each_cell,
    linear,
    make_env,
    memory,
    refused,
    wired,
    zero,
)

pytestmark = pytest.mark.slow

FIX = "let the layers before the action read the outputs of the memory, 'features'"


@pytest.mark.parametrize(("cell", "rows"), each_cell([None, 3]))
def test_a_head_that_reads_the_observation(cell: str, rows: int | None) -> None:
    policy = actor_of(memory(cell), linear(4, "observation"))
    result = refused(policy, wired(policy, rows), "action")
    assert "(the Sampler 'module.1' reads 'logits'): no memory reaches it" in result.detail
    assert FIX in result.fix
    assert "TensorDictSequential(actor, critic)" in result.fix


class Both(nn.Module):
    """Module that takes two inputs and uses one."""

    def __init__(self, use: Callable[..., torch.Tensor], inputs: int, best: bool = False) -> None:
        super().__init__()
        self.use, self.layer, self.best = use, nn.Linear(inputs, 2), best

    def forward(self, x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        out = self.layer(self.use(x, features))
        return out.argmax(-1) if self.best else out


USES = {
    "observation": (lambda x, _: x, 4),
    "slice": (lambda x, features: torch.cat([x, features], -1)[..., :4], 4),
    "nothing": (lambda _, features: 0 * features, 8),
    "zeros": (lambda _, features: torch.zeros_like(features), 8),
}


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize(("use", "inputs"), USES.values(), ids=USES.keys())
def test_a_head_that_is_given_the_memory(use: Any, inputs: int, best: bool) -> None:
    head = Mod(Both(use, inputs, best), ["observation", "features"], ["action" if best else "logits"])
    policy = Seq(memory(), head) if best else actor_of(memory(), head)
    assert FIX in refused(policy, wired(policy), "action").fix


def policies() -> dict[str, nn.Module]:
    choice = Mod(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    values = Mod(nn.Linear(4, 2), ["observation"], ["action_value"])
    spec = Categorical(2)
    wrong = actor_of(linear(4, "observation"))
    return {
        "best": Seq(memory(), linear(4, "observation"), choice),
        "zeros": actor_of(memory(), zero(linear(4, "observation"))),
        "values": Seq(QValueActor(Seq(memory(), values), spec=spec), EGreedyModule(spec, 1.0, 0.1)),
        "shared_trunk": ActorValueOperator(memory(), wrong, ValueOperator(nn.Linear(8, 1), ["features"])),
        "critic_first": Seq(critic_memory(), ValueOperator(nn.Linear(8, 1), ["of_critic"]), wrong),
    }


@pytest.mark.parametrize("name", policies())
def test_whatever_the_policy(name: str) -> None:
    torch.manual_seed(0)
    policy = policies()[name]
    assert "let the layers before the action read" in refused(policy, wired(policy), "action").fix
    assert refused(lambda td: policy(td), wired(policy), "action")


def test_real_actions() -> None:
    parameters = nn.Sequential(nn.Linear(4, 4), NormalParamExtractor())
    head = Mod(parameters, ["observation"], ["loc", "scale"])
    actor = actor_of(memory(), head, in_keys=["loc", "scale"], distribution_class=TanhNormal)
    best = Seq(memory(), Mod(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), ["observation"], ["action"]))
    for policy in (actor, best):
        assert FIX in refused(policy, wired(policy, 2, RealActions), "action").fix


def test_overwritten_features() -> None:
    policy = actor_of(memory(), Mod(nn.Linear(4, 8), ["observation"], ["features"]), linear())
    result = refused(policy, wired(policy), "memory")
    assert "altering the state 'recurrent_state' changes nothing" in result.detail
    assert "let later layers read its output" in result.fix


def test_detail_of_a_passed_check() -> None:
    policy = actor_of(linear(4, "observation"))
    both = Seq(policy, critic_memory(), ValueOperator(nn.Linear(8, 1), ["of_critic"]))
    batch = Collector(make_env(2), both, frames_per_batch=40).collect()
    assert "only the critic uses it" in check_action(both, batch).detail
    policy = actor_of(memory(), linear())
    batch = Collector(make_env(2), policy, frames_per_batch=40).collect()
    assert "altering the states changes" in check_action(policy, batch).detail
    batch["is_init"] = torch.ones_like(batch["is_init"])
    assert "nothing to compare" in check_action(policy, batch).detail
