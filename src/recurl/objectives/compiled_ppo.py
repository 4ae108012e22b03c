"""PPO losses and gradients in one call of the C++ library."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from recurl.core.keys import IS_INIT, MASK, NestedKey
from recurl.core.spans import FORWARD_AND_BACKWARD, span
from recurl.distributed import is_global
from recurl.execution.compiled import CompiledSurrogate, SurrogateData, SurrogateOptions
from recurl.execution.compiled.translations import DENSITIES
from recurl.execution.explain import NotCompiled
from recurl.objectives.common import standardized
from recurl.objectives.compiled_policy import compiled_plan
from recurl.objectives.ppo import ClipPPOLoss
from recurl.objectives.surrogate import DISTANCES, SurrogateInputs
from recurl.sequences.continuity import check_order, check_starts
from recurl.sequences.entries import Step
from recurl.sequences.mode import set_recurrent_mode

__all__ = ["CompiledPPO"]


class CompiledPPO:
    """PPO losses and their gradients, computed together in C++: a form of ``ClipPPOLoss.gradients``.

    Args:
        gradients: the method.

    Raises:
        NotCompiled: the actor's distribution has no density in C++.
    """

    def __init__(self, gradients: Any) -> None:
        self._loss: ClipPPOLoss = gradients.__self__
        self._networks = compiled_plan(self._loss.plan())
        self._keys = self._loss.keys_of(self._networks)
        sampler = self._networks.sampler.module
        density = DENSITIES.find(sampler)
        if density is None:
            raise NotCompiled("the sampler has no density in C++")
        self._density = density(sampler)
        self._descent: CompiledSurrogate | None = None
        self._others: list[Tensor] = []  # parameters that get no gradient

    def __call__(self, batch: Step) -> dict[NestedKey, Tensor]:
        """Return the losses and set the gradients of their sum.

        Raises:
            NotCompiled: the loss or the batch can't be processed; nothing was done.
        """
        loss, keys = self._loss, self._keys
        if loss.value_estimator is not None:
            raise NotCompiled("the loss runs an estimator")
        if loss.metrics and is_global():
            raise NotCompiled("metrics are merged over several ranks")
        if not torch.is_grad_enabled() or batch.get(MASK, None) is not None:
            raise NotCompiled("the batch has padding, or gradients are disabled")
        with set_recurrent_mode(True):
            inputs, boundaries, compiled = self._networks.prepared(batch, keys.value)
            if not compiled.parameters:
                raise NotCompiled("no parameter requires gradients")
            if batch.get(IS_INIT, None) is not None:
                check_order(batch)
                check_starts(batch, self._networks.states)
            if self._descent is None:
                self._descent = CompiledSurrogate(compiled, self._density, keys.value)
                reached = set(map(id, compiled.parameters))
                self._others = [parameter for parameter in loss.parameters() if id(parameter) not in reached]
            data = self._surrogate_data(batch, loss.read(batch, keys, normalize=False))
            options = _options_of(loss)
            if options.normalize and is_global():  # over the tokens of all ranks, which the library doesn't see
                data = data._replace(advantage=standardized(data.advantage, None))
                options = options._replace(normalize=False)
            with span(FORWARD_AND_BACKWARD):
                results = self._descent(inputs, boundaries, data, options)
        for parameter in self._others:
            parameter.grad = None
        found: dict[NestedKey, Tensor] = {name: results.pop(name) for name in ("loss_objective", "loss_critic")}
        if loss.entropy_bonus:
            found["loss_entropy"] = -loss.entropy_coeff * results["entropy"]
        return found | {name: results[name] for name in loss.wanted(results)}

    def _surrogate_data(self, batch: Step, data: SurrogateInputs) -> SurrogateData:
        tokens = batch.batch_size.numel()

        def flat(value: Tensor) -> Tensor:
            return value.reshape(tokens, *value.shape[len(batch.batch_size) :])

        (action,) = self._networks.sampler.actions(batch, self._keys.action)
        mask = None if self._density.mask is None else flat(cast(Tensor, batch.get(self._density.mask)))
        action = flat(action)
        old = None if data.old_value is None else flat(data.old_value)
        return SurrogateData(
            action.long().argmax(-1) if self._density.one_hot else action,
            mask,
            flat(data.log_prob),
            flat(data.advantage),
            flat(data.target),
            old,
        )


def _options_of(loss: ClipPPOLoss) -> SurrogateOptions:
    if loss.distance not in DISTANCES:
        raise NotCompiled(f"it has no distance {loss.distance!r:.80}")
    coefficients = (loss.clip_epsilon, loss.entropy_coeff, loss.critic_coeff)
    if any(isinstance(value, Tensor) and value.requires_grad for value in coefficients):
        raise NotCompiled("a coefficient of the loss requires gradients")
    return SurrogateOptions(
        loss.normalize_advantage,
        loss.distance,
        float(loss.clip_epsilon),
        loss.clip_value,
        float(loss.entropy_coeff) if loss.entropy_bonus else 0.0,
        loss.critic_coeff,
        bool(loss.metrics),
    )
