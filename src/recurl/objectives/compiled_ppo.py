"""The gradients of PPO's losses as one call of the C++ library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from recurl.compiled import Descent, NotCompiled, SurrogateData, SurrogateOptions, can_pass
from recurl.continuity import check_order, check_starts
from recurl.distributed import world_size
from recurl.keys import IS_INIT, MASK, NestedKey
from recurl.lowering import Step, why_not_lowered
from recurl.objectives.compiled_policy import CompiledActorCritic
from recurl.objectives.tensor_keys import TensorKeys
from recurl.spans import FORWARD_AND_BACKWARD, span

if TYPE_CHECKING:
    from recurl.objectives.ppo import ClipPPOLoss

__all__ = ["CompiledPPO"]


class CompiledPPO:
    """Losses and their gradients, computed together.

    Args:
        loss: whose networks and options count as they are now.
        networks: its networks, compiled.
    """

    def __init__(self, loss: ClipPPOLoss, networks: CompiledActorCritic) -> None:
        self._loss, self._networks = loss, networks
        self._keys: TensorKeys = loss.keys_of(networks.plan)
        self._descent: Descent | None = None
        self._mask: NestedKey | None = None
        self._one_hot = False
        self._reason = self._never()

    def _never(self) -> str | None:
        """Return why no batch can be learnt from in this way, or None."""
        if self._loss.value_estimator is not None:
            return "the loss runs an estimator"
        return why_not_lowered(self._networks.plan.networks)

    def __call__(self, batch: Step) -> dict[NestedKey, Tensor] | str:
        """Set the gradients of the sum of the losses; return losses and metrics, or the reason why that can't be."""
        reason = self._reason or can_pass()
        if reason is not None or not torch.is_grad_enabled() or batch.get(MASK, None) is not None:
            return reason or "the batch has padding, or no gradients are wanted"
        if self._loss.metrics and world_size() > 1:
            return "metrics are those of several ranks"
        if batch.get(IS_INIT, None) is not None:
            check_order(batch)
            check_starts(batch, self._networks.plan.states)
        inputs, boundaries = self._networks.inputs(batch)
        if self._descent is None:
            self._begin(inputs)
        compiled = self._networks.compiled
        if self._descent is None or compiled is None or not compiled.fits(inputs):
            return self._reason or "the batch is unlike the first, or something has hooks"
        data = self._data(batch)
        reason = self._descent.why_not(data)
        if reason is not None:
            return reason
        with span(FORWARD_AND_BACKWARD):
            return self._named(self._descent(inputs, boundaries, data, self._options()))

    def _begin(self, inputs: Any) -> None:
        self._networks.begin(inputs, self._keys.value)
        compiled, density = (
            self._networks.compiled,
            getattr(self._networks.plan.sampler.module, "compiled_density", None),
        )
        try:
            if compiled is None or density is None:
                raise NotCompiled(self._networks.reason or "the sampler has no density in C++")
            known = density()
            self._mask, self._one_hot = known.mask, known.one_hot
            self._descent = Descent(compiled, known, self._keys.value)
        except NotCompiled as reason:
            self._reason = str(reason)

    def _data(self, batch: Step) -> SurrogateData:
        loss, plan = self._loss, self._networks.plan
        tokens = batch.batch_size.numel()

        def flat(value: Tensor) -> Tensor:
            return value.reshape(tokens, *value.shape[len(batch.batch_size) :])

        data = loss.read(batch, self._keys, normalize=loss.normalize_advantage and world_size() > 1)
        (action,) = plan.sampler.actions(batch, self._keys.action)
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

    def _options(self) -> SurrogateOptions:
        loss = self._loss
        return SurrogateOptions(
            loss.normalize_advantage and world_size() == 1,  # else over all ranks, before
            loss.distance,
            float(loss.clip_epsilon),
            loss.clip_value,
            float(loss.entropy_coeff) if loss.entropy_bonus else 0.0,
            loss.critic_coeff,
            loss.metrics,
        )

    def _named(self, results: dict[str, Tensor]) -> dict[NestedKey, Tensor]:
        loss = self._loss
        entropy = results.pop("entropy")
        found: dict[NestedKey, Tensor] = {name: results.pop(name) for name in ("loss_objective", "loss_critic")}
        if loss.entropy_bonus:
            found["loss_entropy"] = -loss.entropy_coeff * entropy
        return {**found, "entropy": entropy, **results} if loss.metrics else found
