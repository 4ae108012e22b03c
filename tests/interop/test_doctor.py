"""Checks of the doctor on policies built from TorchRL's modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrl.data
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.core.specs import Unbounded
from recurl.envs import InitTracker, TensorDictPrimer
from tests.diagnostics.policies import RealActions, failures, linear, make_env, memory, refused, wired
from tests.interop.pairs import TORCHRL as rl

pytestmark = pytest.mark.slow


def their_memory() -> nn.Module:
    return rl.LSTMModule(input_size=4, hidden_size=8, in_key="observation", out_key="features")


def actor(*modules: nn.Module, keys: list[str], kind: Any) -> nn.Module:
    return rl.ProbabilisticActor(Seq(*modules), keys, distribution_class=kind, return_log_prob=True)


@pytest.mark.parametrize("rows", [None, 2])
def test_their_memory(rows: int | None) -> None:
    states = TensorDictPrimer(recurrent_state_h=Unbounded(1, 8), recurrent_state_c=Unbounded(1, 8))
    env = make_env(rows, InitTracker(), states)
    assert failures(actor(their_memory(), linear(), keys=["logits"], kind=rl.OneHotCategorical), env) == []
    deaf = actor(their_memory(), linear(4, "observation"), keys=["logits"], kind=rl.OneHotCategorical)
    assert "no memory reaches it" in refused(deaf, env, "action").detail


@pytest.mark.parametrize("kind", [rl.TanhNormal, rl.TruncatedNormal, rl.IndependentNormal])
@pytest.mark.parametrize("layer", [nn.Linear, rl.NoisyLinear])
def test_their_actors(kind: Any, layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    head = Mod(nn.Sequential(layer(8, 4), rl.NormalParamExtractor()), ["features"], ["loc", "scale"])
    policy = actor(memory("lstm"), head, keys=["loc", "scale"], kind=kind)
    env = wired(policy, 2, RealActions)
    if layer is nn.Linear:
        assert failures(policy, env) == []
    else:  # its noise is active while collectors explore, but not in a loss
        assert "independent of exploration_type()" in refused(policy, env, "log_prob").fix


def test_their_action_values() -> None:
    values = Mod(nn.Linear(8, 2), ["features"], ["action_value"])
    explore = rl.EGreedyModule(torchrl.data.Categorical(2), eps_init=1.0)
    policy = Seq(memory(), values, rl.QValueModule(action_space="categorical"), explore)
    assert failures(policy, wired(policy)) == []
