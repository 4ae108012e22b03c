"""Actor and critic of a loss, compiled into one C++ call for the forward and one for the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch import distributions as d

from recurl.core.keys import NestedKey, normalize_key
from recurl.execution.compiled import CompiledPass, check_passes
from recurl.execution.explain import NotCompiled
from recurl.execution.lowering import distribution_of, inputs_of, obstacle_of
from recurl.objectives.common import entry, per_token
from recurl.objectives.policy import ActorCritic
from recurl.sequences.entries import Entries, Step
from recurl.sequences.index import Boundaries

__all__ = ["CompiledActorCritic", "compiled_networks", "compiled_plan"]


class CompiledActorCritic(ActorCritic):
    """An actor and a critic whose passes over sequences are one call of the C++ library forward and one backward.

    Results equal those of the networks to rounding. Modules and parameters that are replaced after the first call
    aren't seen; in-place edits are.
    """

    _pass: CompiledPass | None = None
    _reason: str | None = None

    def __call__(self, batch: Step, value_key: NestedKey) -> tuple[d.Distribution, Tensor]:
        """Return the distribution of actions and the values ``[*B, T]`` of a batch of sequences.

        Raises:
            NotCompiled: the networks can't be compiled, or not for this batch.
        """
        inputs, boundaries, compiled = self.prepared(batch, value_key)
        for key, value in compiled(inputs, boundaries).items():
            inputs.set(key, value)
        value = per_token(value_key, entry(inputs, value_key, "The critic must write it."), batch.batch_size)
        return distribution_of(self.sampler.module, inputs), value

    def prepared(self, batch: Step, value_key: NestedKey) -> tuple[Entries, Boundaries, CompiledPass]:
        """Return the inputs with the states of every token, the boundaries of segments, and the compiled networks.

        Raises:
            NotCompiled: the networks can't be compiled, or not for this batch.
        """
        reason = self._reason or obstacle_of(self.networks)
        if reason is not None:
            raise NotCompiled(reason)
        check_passes()
        inputs = cast(Entries, inputs_of(batch, self.keys, self.networks))
        boundaries: Boundaries | None = None
        for module in (module for network in self.networks for module in network.modules):
            if getattr(module, "state_keys", None):
                boundaries, states = module.sequences(inputs)
                for key, state in states.items():
                    inputs.set(key, state)
        if self._pass is None:
            try:
                self._pass = self._compiled(inputs, value_key)
            except NotCompiled as why:
                self._reason = str(why)
                raise
        if not self._pass.fits(inputs):
            raise NotCompiled("the batch is unlike the first, or a parameter has hooks or was frozen or unfrozen")
        return inputs, Boundaries.of_rows(batch.batch_size) if boundaries is None else boundaries, self._pass

    def _compiled(self, inputs: Entries, value_key: NestedKey) -> CompiledPass:
        branches: list[list[TensorDictModuleBase]] = [list(network.modules) for network in self.networks]
        written = {normalize_key(key) for branch in branches for module in branch for key in module.out_keys}
        wanted = [key for key in map(normalize_key, self.sampler.module.in_keys) if key in written]
        actor, critic = ({normalize_key(k) for m in branch for k in m.out_keys} for branch in branches[1:])
        if critic & set(wanted) or value_key in actor:
            raise NotCompiled("actor and critic write the same entry")
        return CompiledPass(branches, inputs, [*wanted, value_key])


def compiled_networks(gradients: Any) -> Any:
    """Return the gradients of a loss, with its actor and critic compiled; see :mod:`recurl.execution.executor`."""
    return partial(gradients, plan=compiled_plan(gradients.__self__.plan()))


def compiled_plan(plan: ActorCritic) -> CompiledActorCritic:
    """Return an actor and a critic compiled.

    Raises:
        NotCompiled: they run in a way of their own.
    """
    if type(plan).__call__ is not ActorCritic.__call__ or type(plan).run is not ActorCritic.run:
        raise NotCompiled(f"{type(plan).__name__} overrides how the networks run")
    return CompiledActorCritic(*plan)
