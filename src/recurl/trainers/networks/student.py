"""Student of a distillation, and the teacher that acts and labels beside it."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor

from recurl.core import specs
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import ACTION, IS_INIT, NestedKey, dotted, next_key
from recurl.execution.lowering import Link, link, modules_in_order
from recurl.modules import ProbabilisticActor
from recurl.modules.recurrent import RecurrentModule
from recurl.sequences.entries import Entries, StepT, takes_entries
from recurl.sequences.mode import ExplorationType, set_exploration_type
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.action_head import make_action_head
from recurl.trainers.networks.agent import Agent

LABEL = "teacher_action"
"""Key of the teacher's greedy action in a batch."""


class Student(Agent):
    """Recurrent policy of a student.

    Args:
        config: see :class:`Agent`.
        observation_spec: see :class:`Agent`.
        action_spec: action spec of one environment; one tensor.

    Attributes:
        actor: maps observations to actions.
        policy: the same.

    Raises:
        UnsupportedError: the action has several parts, or no distribution.
    """

    def __init__(self, config: RunConfig, observation_spec: specs.Composite, action_spec: specs.TensorSpec) -> None:
        if isinstance(action_spec, specs.Composite):
            raise UnsupportedError(f"Distillation needs actions of one part, got {action_spec}.")
        super().__init__(config, observation_spec)
        trunk = self.trunk(config)
        masked = specs.has_mask(observation_spec, action_spec)
        # A small gain would hide from the memory which choice a cue told: the differences between actions start at 0.
        head = make_action_head(config, trunk[-1].out_keys[0], action_spec, masked=masked, gain=1.0)
        self.actor = ProbabilisticActor(
            TensorDictSequential(*trunk, head.module),
            **head.sampler,
            return_log_prob=True,
            default_interaction_type=ExplorationType.RANDOM,
        )
        self.policy = self.actor


class Greedy(TensorDictModuleBase):
    """Last module of a policy, whose greedy action is written to a key, whatever the exploration type.

    Args:
        last: the sampler or greedy choice.
        key: the key.
    """

    def __init__(self, last: TensorDictModuleBase, key: str) -> None:
        super().__init__()
        self.last = last
        self.in_keys = list(last.in_keys)
        self.out_keys = [key]
        self._key = key

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            return tensordict.set(self._key, self.last(tensordict.copy())[ACTION])

    def link_entries(self) -> Link:
        """Return the same as a function of ``Entries``; see :func:`recurl.execution.lowering.link`."""
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            choose = link(self.last)

        @torch.no_grad()
        def run(entries: Entries) -> None:
            inside = entries.copy()
            choose(inside)
            entries.set(self._key, inside[ACTION])

        return run


class Guidance(TensorDictModuleBase):
    """Replacement of some of the student's actions by the teacher's, drawn for every row and step.

    Attributes:
        share: probability of the teacher's action, a scalar.
    """

    share: Tensor

    def __init__(self, share: float) -> None:
        super().__init__()
        self.register_buffer("share", torch.tensor(share))
        self.in_keys = [ACTION, LABEL]
        self.out_keys = [ACTION]

    @takes_entries
    def forward(self, tensordict: StepT) -> StepT:
        """Choose whose action is taken."""
        own, label = cast(Tensor, tensordict.get(ACTION)), cast(Tensor, tensordict.get(LABEL))
        rows = torch.rand(tensordict.batch_size, device=own.device) < self.share
        return tensordict.set(ACTION, torch.where(rows.reshape(*rows.shape, *[1] * (own.ndim - rows.ndim)), label, own))


def greedy(policy: TensorDictModuleBase, key: str = ACTION) -> TensorDictSequential:
    """Return a policy that writes its greedy action to ``key``, with the same modules."""
    *before, last = modules_in_order(policy)
    return TensorDictSequential(*before, Greedy(last, key))


def teacher_of(actor: TensorDictSequential) -> TensorDictSequential:
    """Return a trained actor as a frozen teacher, with states of its own and the output :data:`LABEL`.

    Args:
        actor: the actor; its recurrent modules get other keys.
    """
    for module in actor.modules():
        if isinstance(module, RecurrentModule):
            renamed: dict[NestedKey, str] = {key: f"teacher_{dotted(key)}" for key in module.state_keys}
            keys: Any = [renamed.get(key, key) for key in module.in_keys]
            outputs: Any = [*module.out_keys[:1], *(next_key(name) for name in renamed.values())]
            module.in_keys, module.out_keys = keys, outputs
    return greedy(actor, LABEL).eval().requires_grad_(False)


def check_teacher(agent: Agent, observation_spec: specs.Composite, lead: int, source: str) -> None:
    """Check that the environment has what a teacher observes.

    Args:
        agent: networks of the teacher.
        observation_spec: observation spec of the student's environment.
        lead: number of its batch dimensions.
        source: the teacher's run.

    Raises:
        ArgumentError: an observation is missing, or has another shape.
    """
    flat = agent.observations.flat
    entries = [*(image.entry for image in agent.observations.images), *([] if flat is None else flat.entries)]
    has = ", ".join(dotted(key) for key in observation_spec.keys(True, True) if key != IS_INIT)
    for entry in entries:
        found = observation_spec.get(entry.key)
        if found is None:
            raise ArgumentError(
                f"The teacher {source} observes {dotted(entry.key)}, which the environment lacks: it has {has}. "
                "Distill in an environment with what both observe, and name what only the teacher sees with "
                "--teacher-observations (a previous action or reward: --previous-action, --previous-reward)."
            )
        if tuple(found.shape[lead:]) != tuple(entry.shape):
            raise ArgumentError(
                f"The teacher {source} observes {entry}, and the environment has {dotted(entry.key)} of shape "
                f"{list(found.shape[lead:])}: use the teacher's environment, or one with the same entry."
            )
