"""Stochastic actors, split into a trunk that runs along sequences and the final distribution."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from tensordict.nn import TensorDictModuleBase

from recurl.core.errors import ArgumentError
from recurl.core.keys import NestedKey, normalize_key
from recurl.execution.lowering import Network, distribution_of, inputs_from, modules_in_order, why_whole
from recurl.objectives.common import states_of
from recurl.objectives.trunks import BootstrapSteps, SequenceTrunk, UnrolledTrunk, outputs_of

__all__ = ["StochasticActor"]


class StochasticActor(NamedTuple):
    """A stochastic actor, split into trunk and sampler.

    Attributes:
        trunk: modules that compute the parameters of the distribution.
        sampler: the last module, which draws actions.
        action_key: key of the action.
    """

    trunk: SequenceTrunk
    sampler: TensorDictModuleBase
    action_key: NestedKey

    @classmethod
    def of(cls, network: TensorDictModuleBase) -> StochasticActor:
        """Split ``network``.

        Raises:
            ArgumentError: the network doesn't end with a sampler of one action.
        """
        *modules, sampler = modules_in_order(network, ignore_global_hooks=True)
        keys = getattr(sampler, "dist_sample_keys", None)
        if keys is None or len(keys) != 1 or states_of(sampler):
            given = f"its last module samples {keys}"
            if keys is None:
                given = f"its last module is a {type(sampler).__name__}"
            elif states_of(sampler):
                given = f"it can't be split: {why_whole(cast(Any, sampler))}"
            raise ArgumentError(
                "The actor must be a sequence that ends with a sampler of one action, such as "
                f"ProbabilisticActor(module, ..., distribution_class=...), but {given}."
            )
        written = set(outputs_of(modules))
        others = [key for key in map(normalize_key, sampler.in_keys) if key not in written]  # such as a mask
        return cls(SequenceTrunk(modules, others), sampler, normalize_key(keys[0]))

    def distribution(self, run: UnrolledTrunk, bootstrap: BootstrapSteps) -> Any:
        """Return the distribution at all tokens, followed by the bootstrap steps, ``[N + E]``."""
        entries = run.entries(map(normalize_key, self.sampler.in_keys), bootstrap)
        count = next(iter(entries.values())).shape[0]
        lowered = inputs_from(entries, torch.Size([count]), None, [Network([])])
        return cast(Any, distribution_of(self.sampler, lowered))
