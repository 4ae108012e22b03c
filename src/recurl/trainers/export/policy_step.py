"""Greedy policy as a function of tensors with explicit hidden states."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn

from recurl.core.keys import IS_INIT, NestedKey, dotted, is_action, next_key
from recurl.modules.recurrent import RecurrentModule
from recurl.sequences.mode import ExplorationType, set_exploration_type, set_recurrent_mode


class PolicyStep(nn.Module):
    """One greedy step of a policy on tensors.

    Args:
        actor: the policy, ending in a sampler or a greedy choice. Its hidden states are those of its recurrent modules.

    Attributes:
        observations: keys of the observations, in argument order.
        states: keys of the hidden states, in argument order.
        actions: key of the action, or keys of its parts, in result order.
        inputs: names of all arguments; the parts of a nested key are joined by a dot.
        outputs: names of all results.

    Shapes:
        observations ``[B, ...]``, ``is_init`` bool ``[B]`` (states are zeroed where it is true; policies without memory
        take it too), states ``[B, L, H]``; to the action ``[B, ...]``, or its parts, and the new states.
    """

    def __init__(self, actor: TensorDictSequential) -> None:
        super().__init__()
        self.actor = actor
        modules = [module for module in actor.modules() if isinstance(module, RecurrentModule)]
        self.states: list[NestedKey] = [key for module in modules for key in module.state_keys]
        known = (IS_INIT, *self.states)
        self.observations = [key for key in cast(list[NestedKey], actor.in_keys) if key not in known]
        self.inputs = [dotted(key) for key in (*self.observations, *known)]
        self.actions = [key for key in cast(list[NestedKey], actor.out_keys) if is_action(key)]
        self.outputs = [*map(dotted, self.actions), *(dotted(next_key(key)) for key in self.states)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the action and the new states for the arguments named in ``inputs``."""
        keys: tuple[Any, ...] = (*self.observations, IS_INIT, *self.states)
        step: TensorDictBase = TensorDict(dict(zip(keys, tensors, strict=True)), tensors[0].shape[:1])
        with set_exploration_type(ExplorationType.DETERMINISTIC), set_recurrent_mode(False):
            return self.results(self.actor(step))

    def arguments(self, root: TensorDictBase) -> tuple[Tensor, ...]:
        """Return the arguments of a step from its root TensorDict, ``[B]``."""
        is_init = root.get(IS_INIT, None)
        flag = torch.zeros(root.batch_size, dtype=torch.bool) if is_init is None else is_init.reshape(root.batch_size)
        return (*(root.get(key) for key in self.observations), flag, *(root.get(key) for key in self.states))

    def results(self, step: TensorDictBase) -> tuple[Tensor, ...]:
        """Return the action and the new states from a TensorDict that the policy has written to."""
        return (*(step.get(key) for key in self.actions), *(step.get(next_key(key)) for key in self.states))
