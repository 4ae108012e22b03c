"""What soft actor-critics for continuous and discrete actions share: an actor and its temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from recurl.core.errors import ArgumentError
from recurl.core.keys import NestedKey
from recurl.objectives.actor_critic import ActorCriticLoss
from recurl.objectives.common import masked_mean
from recurl.objectives.stochastic_actor import StochasticActor
from recurl.objectives.trunks import SequenceTrunk

__all__ = ["SoftLoss", "Temperature"]


class Temperature(nn.Module):
    """Temperature of SAC, the weight of the entropy, stored as its logarithm.

    Each call clamps the stored logarithm itself to the bounds. It is therefore at most one optimizer step out of
    bounds, and an opposite gradient moves the temperature away from a bound immediately.

    Args:
        initial: initial temperature.
        low: lower bound; None for no bound.
        high: upper bound; None for no bound.
        fixed: store a buffer instead of a parameter.

    Raises:
        ArgumentError: ``initial`` isn't positive, or is out of bounds.

    Example:
        >>> Temperature(0.5, None, 0.7)()
        tensor(0.5000)
    """

    log_alpha: Tensor

    def __init__(self, initial: float, low: float | None, high: float | None, *, fixed: bool = False) -> None:
        super().__init__()
        least, most = 0.0 if low is None else low, math.inf if high is None else high
        if not (0.0 < initial < math.inf and 0.0 <= least <= initial <= most):
            raise ArgumentError(
                "alpha_init must be positive and between min_alpha (at least 0) and max_alpha, got "
                f"alpha_init={initial}, min_alpha={low}, max_alpha={high}."
            )
        self._bounds = (math.log(least) if least else None, math.log(most) if most < math.inf else None)
        self.fixed = fixed
        log_alpha = torch.tensor(math.log(initial))
        if fixed:
            self.register_buffer("log_alpha", log_alpha)
        else:
            self.log_alpha = nn.Parameter(log_alpha)

    def forward(self) -> Tensor:
        """Clamp the logarithm to the bounds and return the temperature, without gradient."""
        log_alpha, (low, high) = self.log_alpha.detach(), self._bounds
        return (log_alpha if low is high is None else log_alpha.clamp_(low, high)).exp()


class SoftLoss(ActorCriticLoss):
    """Base class of SAC for continuous and discrete actions: an actor with a temperature.

    Args:
        actor_network: see :class:`~recurl.objectives.SACLoss`.
        qvalue_network: see :class:`~recurl.objectives.SACLoss`.
        temperature: weight of the entropy.
        target_entropy: see :class:`~recurl.objectives.SACLoss`.
        **options: options of :class:`ActorCriticLoss`.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        qvalue_network: TensorDictModuleBase | Sequence[TensorDictModuleBase],
        *,
        temperature: Temperature,
        target_entropy: float | str,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, qvalue_network, **options)
        if isinstance(target_entropy, str) and target_entropy != "auto":
            raise ArgumentError(f"target_entropy must be 'auto' or a number, got {target_entropy!r}.")
        self.target_entropy = target_entropy
        self.temperature = temperature
        self.actor()

    def actor(self) -> StochasticActor:
        """Return the current actor, split into trunk and sampler."""
        return StochasticActor.of(self.actor_network)

    def actor_trunk(self) -> SequenceTrunk:
        """Return the part of the actor that runs along sequences."""
        return self.actor().trunk

    def network_keys(self) -> dict[str, NestedKey]:
        """Return the key of the action, as the actor names it."""
        return {"action": self.actor().action_key}

    @property
    def log_alpha(self) -> Tensor:
        """Logarithm of the temperature: a parameter trained by ``loss_alpha``, or a buffer if it is fixed."""
        return self.temperature.log_alpha

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows the options
        """Names of the losses and metrics."""
        alpha = [] if self.temperature.fixed else ["loss_alpha"]
        priority = self.tensor_keys.priority
        return ["loss_actor", "loss_qvalue", *alpha, "alpha", "entropy", priority, "q_value", "q_target"]

    def with_temperature(
        self, out: dict[NestedKey, Tensor], entropy: Tensor, target_entropy: Tensor, mask: Tensor | None
    ) -> dict[NestedKey, Tensor]:
        """Add the loss and metrics of the temperature to those of actor and critics.

        Args:
            out: losses and metrics of actor and critics.
            entropy: entropy of every token or its estimate, ``[N]``, without gradients.
            target_entropy: target of the entropy, ``[N]`` or a scalar.
            mask: bool ``[N]``, False at padding.
        """
        if not self.temperature.fixed:
            out["loss_alpha"] = self.log_alpha * masked_mean(entropy - target_entropy, mask)
        out |= {"alpha": self.temperature(), "entropy": masked_mean(entropy, mask)}
        return {key: out[key] for key in self.out_keys}
