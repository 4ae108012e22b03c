"""Base class of agents: observations, their statistics, and the policy for collection."""

from __future__ import annotations

from typing import Any, cast

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import nn

from recurl.core import specs
from recurl.core.errors import ArgumentError
from recurl.core.keys import (
    ACTION,
    ADVANTAGE,
    NEXT,
    STATE_VALUE,
    VALUE_TARGET,
    dotted,
    is_action,
    normalize_key,
    path_of,
)
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.observations import Observations
from recurl.trainers.networks.trunk import make_trunk


class Agent(nn.Module):
    """Base class for the networks of a run. Subclasses build them on :meth:`trunk`, the policy first.

    Args:
        config: encoder, cell, sizes, normalization.
        observation_spec: observation spec of the environments, ``[*B]``.

    Attributes:
        observations: the observed entries and how each is encoded.
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
        self.observations = Observations(config, observation_spec)
        self.norm = self.observations.norm
        self.scales = nn.ModuleList(image.scale for image in self.observations.images)

    def trunk(self, config: RunConfig, prefix: str = "") -> list[TensorDictModuleBase]:
        """Build an untrained encoder and memory whose output keys begin with ``prefix``."""
        return make_trunk(config, self.observations, prefix)

    def observe(self, batch: TensorDictBase) -> None:
        """Update the running statistics with the observations of a batch ``[*B]``."""
        self.observations.update(batch)


def check_names(agent: Agent) -> None:
    """Raise if the networks or losses of a run would overwrite an observation.

    Raises:
        ArgumentError: observation names clash with output keys.
    """
    outputs = (key for part in agent.modules() if isinstance(part, TensorDictModuleBase) for key in part.out_keys)
    paths = [path_of(normalize_key(key)) for key in outputs]
    written = {ADVANTAGE, STATE_VALUE, VALUE_TARGET, *(path[path[0] == NEXT] for path in paths)}
    clashes = [dotted(key) for key in agent.observations.keys if path_of(key)[0] in written]
    if clashes:
        raise ArgumentError(
            f"The environment's observations {clashes} clash with entries that the networks and losses of a run "
            f"write, {sorted(written)}: rename them in the environment, or leave them out with --drop-observations "
            f"{' '.join(clashes)}."
        )


def collecting(policy: TensorDictModuleBase) -> TensorDictSequential:
    """Return ``policy`` restricted to the outputs that a batch needs: actions, log-probabilities and new states."""
    written = [normalize_key(key) for key in policy.out_keys]
    kept = [key for key in written if is_action(key) or key == f"{ACTION}_log_prob" or key[0] == NEXT]
    return TensorDictSequential(policy, selected_out_keys=cast(Any, kept))
