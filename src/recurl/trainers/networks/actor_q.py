"""Actor and action-value critics of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from recurl import specs
from recurl.keys import ACTION, NestedKey
from recurl.trainers.config import NO_CELL, RunConfig
from recurl.trainers.networks.agent import Agent
from recurl.trainers.networks.layers import initialised, make_head

__all__ = ["ActionValues", "ActorQ", "is_box"]


def is_box(spec: specs.TensorSpec) -> bool:
    """Return whether actions are real numbers, with bounds or without.

    Example:
        >>> is_box(specs.Bounded(-1.0, 1.0, (2,))), is_box(specs.Categorical(3))
        (True, False)
    """
    real = spec.dtype is not None and spec.dtype.is_floating_point
    return isinstance(spec, specs.Bounded | specs.Unbounded) and real


class ActionValues(nn.Module):
    """Values of actions: features ``[*B, H]`` and actions ``[*B, *A]``, scaled to [-1, 1], to ``[*B, 1]``.

    Args:
        config: width of the hidden layer, ``head_width``, or ``hidden_size`` where that is 0.
        spec: the action of one environment, real numbers.

    Example:
        >>> from recurl.trainers import SACConfig
        >>> net = ActionValues(SACConfig(env="x", hidden_size=8), specs.Bounded(-2.0, 2.0, (3,)))
        >>> net(torch.zeros(5, 8), torch.zeros(5, 3)).shape
        torch.Size([5, 1])
    """

    centre: Tensor
    half_range: Tensor

    def __init__(self, config: RunConfig, spec: specs.TensorSpec) -> None:
        super().__init__()
        low = high = torch.zeros(spec.shape)
        if isinstance(spec, specs.Bounded):
            low, high = spec.low.float(), spec.high.float()
        bounded = isinstance(spec, specs.Bounded)
        self.register_buffer("centre", (low + high) / 2, persistent=False)
        self.register_buffer("half_range", (high - low) / 2 if bounded else torch.ones(spec.shape), persistent=False)
        width = config.head_width or config.hidden_size
        self.hidden = initialised(nn.Linear(config.hidden_size + spec.shape.numel(), width), math.sqrt(2))
        self.out = initialised(nn.Linear(width, 1), 1.0)

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        """Return the values."""
        scaled = (action.to(features.dtype) - self.centre) / self.half_range
        scaled = scaled.reshape(*features.shape[:-1], -1)
        return self.out(torch.relu(self.hidden(torch.cat([features, scaled], -1))))


class ActorQ(Agent):
    """Actor of a run, and critics that give values to actions.

    The critics have one memory in common, which may be the actor's; each has layers of its own after it.

    Args:
        config: see :class:`Agent`.
        observation_spec: see :class:`Agent`.
        action_spec: actions of one environment. Critics of real numbers read the action, others give values to all
            choices.
        shared_trunk: give actor and critics one encoder and one memory.
        critics: number of critics.
        explore: what changes the actor's actions while collecting.

    Attributes:
        actor: from observations to actions; a subclass builds it with :meth:`make_actor`.
        critics: from observations and action to ``"state_action_value"``, or to ``"action_value"``.
        chooses: whether actions are choices, of which the critics value all.
        policy: the actor, and before it the critics' trunk when they have their own.
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
        actor_trunk = self.trunk(config, "" if shared_trunk else "actor_")
        critic_trunk = actor_trunk if shared_trunk else self.trunk(config, "critic_")
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
        """Return the actor, on its encoder and memory."""
        raise NotImplementedError

    def critic_list(self) -> list[TensorDictModuleBase]:
        """Return the critics."""
        return list(cast(Iterable[TensorDictModuleBase], self.critics))

    def actor_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the actor that are not the critics'."""
        others = set(self.critics.parameters())
        return [parameter for parameter in self.actor.parameters() if parameter not in others]


def _value_head(config: RunConfig, spec: specs.TensorSpec, memory: NestedKey) -> TensorDictModule:
    if is_box(spec):
        keys: Any = [memory, ACTION]
        return TensorDictModule(ActionValues(config, spec), in_keys=keys, out_keys=["state_action_value"])
    net = make_head(config, sum(specs.choice_counts(spec)))
    return TensorDictModule(net, in_keys=cast(Any, [memory]), out_keys=["action_value"])
