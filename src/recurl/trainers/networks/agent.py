"""Base of all agents: flat observations, their statistics, and a policy to collect with."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import nn

from recurl import specs
from recurl.keys import ACTION, ACTION_MASK, NEXT, is_action, normalize_key
from recurl.modules import ObservationNorm
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.trunk import FlatObservation, make_trunk


class Agent(nn.Module):
    """The networks of a run; a subclass builds them on :meth:`trunk`, the policy first.

    Args:
        config: cell, sizes, normalisation.
        observation_spec: observations of the environments, ``[*B]``.

    Attributes:
        flat: turns observations into one vector.
        norm: statistics of these vectors, or None.
        actor: the policy that is evaluated and exported.
        policy: the policy that collects: exploration included, and every module with a hidden state that has to be
            carried. See :func:`collecting`.
    """

    actor: TensorDictSequential
    policy: TensorDictModuleBase

    def __init__(self, config: RunConfig, observation_spec: specs.Composite) -> None:
        super().__init__()
        self.flat = FlatObservation(observation_spec if config.show_action_mask else without_mask(observation_spec))
        self.norm = ObservationNorm((self.flat.features,)) if config.normalize_observations else None

    def trunk(self, config: RunConfig, prefix: str = "") -> list[TensorDictModuleBase]:
        """Return encoder and memory, untrained; the keys that they write begin with ``prefix``."""
        return make_trunk(config, self.flat, self.norm, prefix)

    def observe(self, batch: TensorDictBase) -> None:
        """Add the observations of a batch ``[*B]`` to the statistics."""
        if self.norm is not None:
            self.norm.update(self.flat(*(batch[key] for key in self.flat.keys)))


def without_mask(observation_spec: specs.Composite) -> specs.Composite:
    """Return the observations but for an action mask, which acts on the outputs of the networks."""
    mask = observation_spec.get(ACTION_MASK)
    if not isinstance(mask, specs.Binary) or mask.dtype is not torch.bool:
        return observation_spec
    rest = {name: spec for name, spec in observation_spec.items() if name != ACTION_MASK}
    return specs.Composite(rest, shape=observation_spec.shape, device=observation_spec.device)


def collecting(policy: TensorDictModuleBase) -> TensorDictSequential:
    """Return ``policy``, restricted to the outputs that a batch needs: actions, log-probabilities, new states."""
    written = [normalize_key(key) for key in policy.out_keys]
    kept = [key for key in written if is_action(key) or key == f"{ACTION}_log_prob" or key[0] == NEXT]
    return TensorDictSequential(policy, selected_out_keys=cast(Any, kept))
