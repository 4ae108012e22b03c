"""Actors with action-value critics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from recurl.core import specs
from recurl.core.keys import ACTION, NestedKey
from recurl.trainers.config import NO_CELL, RunConfig
from recurl.trainers.networks.agent import Agent
from recurl.trainers.networks.layers import initialized, make_head

__all__ = ["ActionValues", "ActorQ", "is_box"]


def is_box(spec: specs.TensorSpec) -> bool:
    """Return whether actions are real-valued, bounded or unbounded.

    Example:
        >>> is_box(specs.Bounded(-1.0, 1.0, (2,))), is_box(specs.Categorical(3))
        (True, False)
    """
    real = spec.dtype is not None and spec.dtype.is_floating_point
    return isinstance(spec, specs.Bounded | specs.Unbounded) and real


class ActionValues(nn.Module):
    """Q-value head for continuous actions: features ``[*B, H]`` and actions ``[*B, *A]`` to values ``[*B, 1]``.

    Bounded actions are rescaled to [-1, 1].

    Args:
        config: the hidden layer is ``head_width`` wide, or ``hidden_size`` if that is 0.
        spec: action spec of one environment, real-valued.

    Example:
        >>> from recurl.trainers import SACConfig
        >>> net = ActionValues(SACConfig(env="x", hidden_size=8), specs.Bounded(-2.0, 2.0, (3,)))
        >>> net(torch.zeros(5, 8), torch.zeros(5, 3)).shape
        torch.Size([5, 1])
    """

    center: Tensor
    half_range: Tensor

    def __init__(self, config: RunConfig, spec: specs.TensorSpec) -> None:
        super().__init__()
        low = high = torch.zeros(spec.shape)
        if isinstance(spec, specs.Bounded):
            low, high = spec.low.float(), spec.high.float()
        bounded = isinstance(spec, specs.Bounded)
        self.register_buffer("center", (low + high) / 2, persistent=False)
        self.register_buffer("half_range", (high - low) / 2 if bounded else torch.ones(spec.shape), persistent=False)
        width = config.head_width or config.hidden_size
        self.hidden = initialized(nn.Linear(config.hidden_size + spec.shape.numel(), width), math.sqrt(2))
        self.out = initialized(nn.Linear(width, 1), 1.0)

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        """Return the action values."""
        scaled = (action.to(features.dtype) - self.center) / self.half_range
        scaled = scaled.reshape(*features.shape[:-1], -1)
        return self.out(torch.relu(self.hidden(torch.cat([features, scaled], -1))))


class ActorQ(Agent):
    """Actor and action-value critics of a run.

    The critics share one memory, which may also be the actor's, and have separate heads.

    Args:
        config: see :class:`Agent`.
        observation_spec: see :class:`Agent`.
        action_spec: action spec of one environment. For real-valued actions the critics take the action as an input;
            for discrete ones they output the values of all choices.
        shared_trunk: whether actor and critics share one encoder and one memory.
        critics: number of critics.
        explore: module that perturbs the actor's actions during collection.

    Attributes:
        actor: maps observations to actions; subclasses build it in :meth:`make_actor`.
        critics: map observations and action to ``"state_action_value"``, or observations to ``"action_value"``.
        chooses: whether actions are discrete, so that the critics output the values of all choices.
        policy: the actor, preceded by the critics' trunk if that is separate.
    """

    def __init__(
        self,
        config: RunConfig,
        observation_spec: specs.Composite,
        action_spec: specs.TensorSpec,
        *,
        shared_trunk: bool,
        critics: int = 2,
        explore: TensorDictModuleBase | None = None,
    ) -> None:
        super().__init__(config, observation_spec)
        actor_trunk, critic_trunk = self.trunks(config, shared=shared_trunk)
        memory = critic_trunk[-1].out_keys[0]
        self.chooses = not is_box(action_spec)
        heads = [_value_head(config, action_spec, memory) for _ in range(critics)]
        self.actor = self.make_actor(config, observation_spec, action_spec, actor_trunk)
        self.critics = nn.ModuleList(TensorDictSequential(*critic_trunk, head) for head in heads)
        carried = [] if shared_trunk or config.cell == NO_CELL else critic_trunk
        self.explore = explore
        self.policy = TensorDictSequential(*carried, self.actor, *([] if explore is None else [explore]))

    def make_actor(
        self,
        config: RunConfig,
        observation_spec: specs.Composite,
        action_spec: specs.TensorSpec,
        trunk: list[TensorDictModuleBase],
    ) -> TensorDictSequential:
        """Build the actor on top of ``trunk``."""
        raise NotImplementedError

    def critic_list(self) -> list[TensorDictModuleBase]:
        """Return the critics."""
        return list(cast(Iterable[TensorDictModuleBase], self.critics))

    def actor_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the actor that the critics don't share."""
        others = set(self.critics.parameters())
        return [parameter for parameter in self.actor.parameters() if parameter not in others]


def _value_head(config: RunConfig, spec: specs.TensorSpec, memory: NestedKey) -> TensorDictModule:
    if is_box(spec):
        keys: Any = [memory, ACTION]
        return TensorDictModule(ActionValues(config, spec), in_keys=keys, out_keys=["state_action_value"])
    net = make_head(config, sum(specs.choice_counts(spec)))
    return TensorDictModule(net, in_keys=cast(Any, [memory]), out_keys=["action_value"])
