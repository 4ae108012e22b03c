"""Actors that draw their actions: the part that runs along sequences, and the distribution it ends with."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from tensordict.nn import TensorDictModuleBase

from recurl.errors import ArgumentError
from recurl.keys import NestedKey, normalize_key
from recurl.lowering import Network, distribution_of, inputs_from, modules_in_order, why_whole
from recurl.objectives.common import states_of
from recurl.objectives.trunks import Ahead, Trunk, TrunkRun, outputs_of

__all__ = ["StochasticActor"]


class StochasticActor(NamedTuple):
    """An actor, taken apart.

    Attributes:
        trunk: what computes the parameters of the distribution.
        sampler: the last module, which draws.
        action_key: the action.
    """

    trunk: Trunk
    sampler: TensorDictModuleBase
    action_key: NestedKey

    @classmethod
    def of(cls, network: TensorDictModuleBase) -> StochasticActor:
        """Take ``network`` apart.

        Raises:
            ArgumentError: it doesn't end with a sampler of one action.
        """
        *modules, sampler = modules_in_order(network, apart=True)
        keys = getattr(sampler, "dist_sample_keys", None)
        if keys is None or len(keys) != 1 or states_of(sampler):
            given = f"the last module of this one samples {keys}"
            if keys is None:
                given = f"the last module of this one is a {type(sampler).__name__}"
            elif states_of(sampler):
                given = f"this one can't be taken apart: {why_whole(cast(Any, sampler))}"
            raise ArgumentError(
                "The actor must be a sequence that ends with a sampler of one action, as "
                f"ProbabilisticActor(module, ..., distribution_class=...); {given}."
            )
        written = set(outputs_of(modules))
        others = [key for key in map(normalize_key, sampler.in_keys) if key not in written]  # such as a mask
        return cls(Trunk(modules, others), sampler, normalize_key(keys[0]))

    def distribution(self, run: TrunkRun, ahead: Ahead) -> Any:
        """Return the distribution of all tokens, and then of the steps past the ends, ``[N + E]``."""
        entries = run.entries(map(normalize_key, self.sampler.in_keys), ahead)
        count = next(iter(entries.values())).shape[0]
        lowered = inputs_from(entries, torch.Size([count]), None, [Network([])])
        return cast(Any, distribution_of(self.sampler, lowered))
