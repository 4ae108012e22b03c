"""Base class of agents: observations, their statistics, and the policy for collection."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import nn

from recurl.core import specs
from recurl.core.errors import ArgumentError
from recurl.core.keys import (
    ACTION,
    ACTION_MASK,
    ADVANTAGE,
    AGENT_MASK,
    IS_INIT,
    MASK,
    NEXT,
    STATE_VALUE,
    VALUE_TARGET,
    dotted,
    is_action,
    is_within,
    normalize_key,
    path_of,
)
from recurl.core.ranges import flag
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.observations import Observations
from recurl.trainers.networks.trunk import make_trunk


class Agent(nn.Module):
    """Base class for the networks of a run. Subclasses build them on :meth:`trunk` or :meth:`trunks`, the policy first.

    Args:
        config: encoder, cell, sizes, normalization.
        observation_spec: observation spec of the environments, ``[*B]``.

    Attributes:
        observations: the observed entries and how each is encoded.
        all_observations: the same with those that only a critic or a teacher observes, if there are any.
        norm: running statistics of the numeric observations, or None.
        scales: scale factors of the image observations.
        actor: the policy used for evaluation and export.
        policy: the policy used for collection. It includes exploration and every module whose hidden state must be
            carried. See :func:`collecting`.
    """

    actor: TensorDictSequential
    policy: TensorDictModuleBase

    def __init__(self, config: RunConfig, observation_spec: specs.Composite) -> None:
        super().__init__()
        private = private_observations(config, observation_spec)
        self.observations = Observations(config, observation_spec, without=private)
        self.all_observations = Observations(config, observation_spec) if private else self.observations
        self.norm = self.observations.norm
        self.scales = nn.ModuleList(image.scale for image in self.observations.images)

    def trunk(self, config: RunConfig, prefix: str = "") -> list[TensorDictModuleBase]:
        """Build an untrained encoder and memory whose output keys begin with ``prefix``."""
        return make_trunk(config, self.observations, prefix)

    def trunks(
        self, config: RunConfig, *, shared: bool
    ) -> tuple[list[TensorDictModuleBase], list[TensorDictModuleBase]]:
        """Build the untrained trunks of actor and critic, which are the same if they are shared."""
        actor = self.trunk(config, "" if shared else "actor_")
        return actor, actor if shared else make_trunk(config, self.all_observations, "critic_")

    def observe(self, batch: TensorDictBase) -> None:
        """Update the running statistics with the observations of a batch ``[*B]``, except those of absent agents."""
        mask = batch.get(MASK, None)
        if mask is not None:
            batch = batch.select(*self.all_observations.keys)[mask]
        self.observations.update(batch)
        if self.all_observations is not self.observations:
            self.all_observations.update(batch)


def private_observations(config: RunConfig, observation_spec: specs.Composite) -> tuple[str, ...]:
    """Return the entries that the actor doesn't observe, but a critic or a teacher does.

    Raises:
        ArgumentError: the environment lacks one of them, or the actor needs it.
    """
    private = config.private_observations
    if not private:
        return private
    option = flag(config.private_option or "")
    keys = [
        key for key in observation_spec.keys(include_nested=True, leaves_only=True) if key not in (IS_INIT, AGENT_MASK)
    ]
    has = ", ".join(map(dotted, keys))
    missing = next((name for name in private if not any(is_within(key, [name]) for key in keys)), None)
    if missing is not None:
        raise ArgumentError(
            f"{option} names observations that the actor doesn't see, and the environment has no {missing!r}: it has "
            f"{has}."
        )
    masked = ACTION_MASK in keys and observation_spec[ACTION_MASK].dtype is torch.bool
    if masked and is_within(ACTION_MASK, private):
        raise ArgumentError(f"The actor reads the {ACTION_MASK}: leave it out of {option}.")
    if all(is_within(key, private) for key in keys):
        raise ArgumentError(
            f"{option} must leave the actor an observation: the environment has {has}, and it names "
            f"{', '.join(private)}."
        )
    return private


def check_names(agent: Agent) -> None:
    """Raise if the networks or losses of a run would overwrite an observation.

    Raises:
        ArgumentError: observation names clash with output keys.
    """
    outputs = (key for part in agent.modules() if isinstance(part, TensorDictModuleBase) for key in part.out_keys)
    paths = [path_of(normalize_key(key)) for key in outputs]
    written = {ADVANTAGE, STATE_VALUE, VALUE_TARGET, *(path[path[0] == NEXT] for path in paths)}
    clashes = [dotted(key) for key in agent.all_observations.keys if path_of(key)[0] in written]
    if clashes:
        raise ArgumentError(
            f"The environment's observations {clashes} clash with entries that the networks and losses of a run "
            f"write, {sorted(written)}: rename them in the environment, or leave them out with --drop-observations "
            f"{' '.join(clashes)}."
        )


def collecting(policy: TensorDictModuleBase, also: Collection[str] = ()) -> TensorDictSequential:
    """Return ``policy`` restricted to the outputs that a batch needs: actions, log-probabilities and new states.

    Args:
        policy: the policy.
        also: keys of further outputs.
    """
    written = [normalize_key(key) for key in policy.out_keys]
    needed = (f"{ACTION}_log_prob", *also)
    kept = [key for key in written if is_action(key) or key in needed or key[0] == NEXT]
    return TensorDictSequential(policy, selected_out_keys=cast(Any, kept))
