"""Actor and critic of a loss, compiled into one C++ call for the forward and one for the backward pass."""

from __future__ import annotations

from typing import Any, cast

from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch import distributions as d

from recurl.core.keys import NestedKey, normalize_key
from recurl.execution.compiled import CompiledPass, NotCompiled, why_no_pass
from recurl.execution.lowering import distribution_of, inputs_of, why_not_lowered
from recurl.objectives.common import entry, per_token
from recurl.objectives.policy import ActorCritic
from recurl.sequences.boundaries import Boundaries
from recurl.sequences.entries import Entries, Step

__all__ = ["CompiledActorCritic"]


class CompiledActorCritic:
    """An actor and a critic, compiled once for several batches.

    Networks that can't be compiled, and batches unlike the first, run through ``plan``. Results equal those of the plan
    to rounding.

    Args:
        plan: the split networks.

    Attributes:
        plan: see above.
        compiled: the compiled networks, from the first batch on; None if they can't be compiled.
        reason: why they can't be compiled, or None.
    """

    def __init__(self, plan: ActorCritic) -> None:
        self.plan = plan
        self._recurrent_modules: list[Any] = [
            module for network in plan.networks for module in network.modules if getattr(module, "state_keys", None)
        ]
        self.compiled: CompiledPass | None = None
        self.reason: str | None = None

    def why_not_compiled(self, batch: Step, value_key: NestedKey) -> str | None:
        """Return why the networks don't run on ``batch`` as one call, or None if they do."""
        reason = why_not_lowered(self.plan.networks) or why_no_pass()
        if reason is not None:
            return reason
        inputs, _ = self.inputs(batch)
        self.compile(inputs, value_key)
        if self.compiled is None:
            return self.reason
        return None if self.compiled.fits(inputs) else "the batch is unlike the first, or a parameter has hooks"

    def __call__(self, batch: Step, value_key: NestedKey) -> tuple[d.Distribution, Tensor]:
        """Return the distribution of actions and the values ``[*B, T]`` of a batch of sequences."""
        if self.reason is not None or why_not_lowered(self.plan.networks) or why_no_pass():
            return self.plan(batch, value_key)
        inputs, boundaries = self.inputs(batch)
        self.compile(inputs, value_key)
        if self.compiled is None or not self.compiled.fits(inputs):
            return self.plan(batch, value_key)
        for key, value in self.compiled(inputs, boundaries).items():
            inputs.set(key, value)
        value = per_token(value_key, entry(inputs, value_key, "The critic must write it."), batch.batch_size)
        return distribution_of(self.plan.sampler.module, inputs), value

    def inputs(self, batch: Step) -> tuple[Entries, Boundaries]:
        """Return the inputs of the networks, with states of every token, and the boundaries of segments."""
        inputs = cast(Entries, inputs_of(batch, self.plan.keys, self.plan.networks))
        boundaries: Boundaries | None = None
        for module in self._recurrent_modules:
            boundaries, states = module.sequences(inputs)
            for key, state in states.items():
                inputs.set(key, state)
        return inputs, Boundaries.of_rows(batch.batch_size) if boundaries is None else boundaries

    def compile(self, inputs: Entries, value_key: NestedKey) -> None:
        """Compile the networks at the first batch."""
        if self.compiled is not None or self.reason is not None:
            return
        plan = self.plan
        branches: list[list[TensorDictModuleBase]] = [list(network.modules) for network in plan.networks]
        written = {normalize_key(key) for branch in branches for module in branch for key in module.out_keys}
        wanted = [key for key in map(normalize_key, plan.sampler.module.in_keys) if key in written]
        actor, critic = ({normalize_key(k) for m in branch for k in m.out_keys} for branch in branches[1:])
        try:
            if critic & set(wanted) or value_key in actor:
                raise NotCompiled("actor and critic write the same entry")
            self.compiled = CompiledPass(branches, inputs, [*wanted, value_key])
        except NotCompiled as reason:
            self.reason = str(reason)
