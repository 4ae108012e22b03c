"""A small agent, built from the recurrent modules of either TorchRL or recurl."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torchrl.modules
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.envs import ExplorationType, GymEnv, StepCounter, TransformedEnv

import recurl.modules
from recurl.modules import NormalParamExtractor

TORCHRL, RECURL = torchrl.modules, recurl.modules


def recurrent(library: ModuleType, name: str, **options: Any) -> TensorDictModuleBase:
    """An LSTM from observations ``[*B, 3]`` to ``name`` ``[*B, 8]``, states ``name_h`` and ``name_c``."""
    states = [f"{name}_h", f"{name}_c"]
    return library.LSTMModule(
        3, 8, in_keys=["observation", *states], out_keys=[name, *(("next", key) for key in states)], **options
    )


def actor_and_critic(
    library: ModuleType, heads: ModuleType = TORCHRL, **options: Any
) -> tuple[TensorDictModuleBase, TensorDictModuleBase]:
    """A stochastic actor and a critic for Pendulum, with the memory of one library and the heads of another.

    Whatever the libraries, the weights are the same.
    """
    torch.manual_seed(0)
    head = TensorDictModule(
        nn.Sequential(nn.Linear(8, 2), NormalParamExtractor()), in_keys=["memory"], out_keys=["loc", "scale"]
    )
    actor = heads.ProbabilisticActor(
        TensorDictSequential(recurrent(library, "memory", **options), head),
        in_keys=["loc", "scale"],
        distribution_class=heads.TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )
    value = heads.ValueOperator(nn.Linear(8, 1), in_keys=["value_memory"])
    return actor, TensorDictSequential(recurrent(library, "value_memory", **options), value)


def pendulum() -> TransformedEnv:
    """TorchRL's Pendulum, episodes of 13 steps."""
    env = TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(max_steps=13))
    env.set_seed(0)
    return env


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
