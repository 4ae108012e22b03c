"""Base of all agents: what is observed, its statistics, and a policy to collect with."""

from __future__ import annotations

from typing import Any, cast

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import nn

from recurl import specs
from recurl.errors import ArgumentError
from recurl.keys import (
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
    """The networks of a run; a subclass builds them on :meth:`trunk`, the policy first.

    Args:
        config: encoder, cell, sizes, normalisation.
        observation_spec: observations of the environments, ``[*B]``.

    Attributes:
        observations: which entries are observed, and how each is encoded.
        norm: statistics of the numbers among them, or None.
        scales: factors of the images among them.
        actor: the policy that is evaluated and exported.
        policy: the policy that collects: exploration included, and every module with a hidden state that has to be
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
        """Return encoder and memory, untrained; the keys that they write begin with ``prefix``."""
        return make_trunk(config, self.observations, prefix)

    def observe(self, batch: TensorDictBase) -> None:
        """Add the observations of a batch ``[*B]`` to the statistics."""
        self.observations.update(batch)


def check_names(agent: Agent) -> None:
    """Refuse observations that the networks and losses of a run would overwrite.

    Raises:
        ArgumentError: naming them.
    """
    outputs = (key for part in agent.modules() if isinstance(part, TensorDictModuleBase) for key in part.out_keys)
    paths = [path_of(normalize_key(key)) for key in outputs]
    written = {ADVANTAGE, STATE_VALUE, VALUE_TARGET, *(path[path[0] == NEXT] for path in paths)}
    clashes = [dotted(key) for key in agent.observations.keys if path_of(key)[0] in written]
    if clashes:
        raise ArgumentError(
            f"The environment's observations {clashes} have names of entries that the networks and losses of a run "
            f"write, {sorted(written)}: rename them in the environment, or leave them out with --drop-observations "
            f"{' '.join(clashes)}."
        )


def collecting(policy: TensorDictModuleBase) -> TensorDictSequential:
    """Return ``policy``, restricted to the outputs that a batch needs: actions, log-probabilities, new states."""
    written = [normalize_key(key) for key in policy.out_keys]
    kept = [key for key in written if is_action(key) or key == f"{ACTION}_log_prob" or key[0] == NEXT]
    return TensorDictSequential(policy, selected_out_keys=cast(Any, kept))
