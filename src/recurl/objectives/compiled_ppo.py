"""PPO losses and gradients in one call of the C++ library."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from recurl.core.keys import IS_INIT, MASK, NestedKey
from recurl.core.spans import FORWARD_AND_BACKWARD, span
from recurl.distributed import is_global
from recurl.execution.compiled import (
    CompiledSurrogate,
    NotCompiled,
    SurrogateData,
    SurrogateOptions,
    why_no_pass,
)
from recurl.execution.compiled.translations import DENSITIES
from recurl.execution.lowering import why_not_lowered
from recurl.objectives.common import standardized
from recurl.objectives.compiled_policy import CompiledActorCritic
from recurl.objectives.surrogate import SurrogateInputs
from recurl.objectives.tensor_keys import TensorKeys
from recurl.sequences.continuity import check_order, check_starts
from recurl.sequences.entries import Step

__all__ = ["CompiledPPO"]


class CompiledPPO:
    """PPO losses and their gradients, computed together in C++.

    Args:
        networks: compiled actor and critic.
        keys: keys of the entries that the losses read.

    Attributes:
        keys: see above.
    """

    def __init__(self, networks: CompiledActorCritic, keys: TensorKeys) -> None:
        self._networks = networks
        self.keys = keys
        self._descent: CompiledSurrogate | None = None
        self._mask: NestedKey | None = None
        self._one_hot = False
        self._reason = why_not_lowered(networks.plan.networks)

    def why_not(self, batch: Step) -> str | None:
        """Return why ``batch`` can't be processed, as far as its keys and shapes tell, or None."""
        reason = self._reason or why_no_pass()
        if reason is None and (not torch.is_grad_enabled() or batch.get(MASK, None) is not None):
            return "the batch has padding, or gradients are disabled"
        return reason

    def __call__(self, batch: Step, data: SurrogateInputs, options: SurrogateOptions) -> dict[str, Tensor] | str:
        """Set the gradients of the sum of the losses.

        Args:
            batch: a batch for which :meth:`why_not` returns None.
            data: its loss inputs, with advantages not normalized.
            options: options of the losses.

        Returns:
            Losses and metrics, or the reason why nothing was done.
        """
        if batch.get(IS_INIT, None) is not None:
            check_order(batch)
            check_starts(batch, self._networks.plan.states)
        inputs, boundaries = self._networks.inputs(batch)
        if self._descent is None:
            self._compile(inputs)
        compiled = self._networks.compiled
        if self._descent is None or compiled is None or not compiled.fits(inputs):
            return self._reason or "the batch is unlike the first, or a parameter has hooks"
        given = self._surrogate_data(batch, data)
        reason = self._descent.why_not(given)
        if reason is not None:
            return reason
        if options.normalize and is_global():  # over the tokens of all ranks, which the library doesn't see
            given = given._replace(advantage=standardized(given.advantage, None))
            options = options._replace(normalize=False)
        with span(FORWARD_AND_BACKWARD):
            return self._descent(inputs, boundaries, given, options)

    def _compile(self, inputs: Any) -> None:
        self._networks.compile(inputs, self.keys.value)
        compiled, sampler = self._networks.compiled, self._networks.plan.sampler.module
        density = DENSITIES.find(sampler)
        try:
            if compiled is None or density is None:
                raise NotCompiled(self._networks.reason or "the sampler has no density in C++")
            known = density(sampler)
            self._mask, self._one_hot = known.mask, known.one_hot
            self._descent = CompiledSurrogate(compiled, known, self.keys.value)
        except NotCompiled as reason:
            self._reason = str(reason)

    def _surrogate_data(self, batch: Step, data: SurrogateInputs) -> SurrogateData:
        tokens = batch.batch_size.numel()

        def flat(value: Tensor) -> Tensor:
            return value.reshape(tokens, *value.shape[len(batch.batch_size) :])

        (action,) = self._networks.plan.sampler.actions(batch, self.keys.action)
        mask = None if self._mask is None else flat(cast(Tensor, batch.get(self._mask)))
        action = flat(action)
        old = None if data.old_value is None else flat(data.old_value)
        return SurrogateData(
            action.argmax(-1) if self._one_hot else action,
            mask,
            flat(data.log_prob),
            flat(data.advantage),
            flat(data.target),
            old,
        )
