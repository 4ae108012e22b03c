"""REINFORCE with a baseline."""

from __future__ import annotations

from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.keys import NestedKey
from recurl.core.messages import without_arguments
from recurl.objectives.policy import ActorCritic
from recurl.objectives.policy_gradient import PolicyGradientLoss, mask_of
from recurl.objectives.tensor_keys import TensorKeys
from recurl.sequences.entries import Step

__all__ = ["ReinforceLoss"]


@without_arguments(delay_value="leave it out, targets are computed before the network is changed")
class ReinforceLoss(PolicyGradientLoss):
    """Policy-gradient loss with a baseline, and the loss of the baseline.

    Source: Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning"
    (1992). The losses to be summed and minimized are::

        loss_actor = -mean(log_prob * A)
        loss_value = mean(distance(V, value_target))

    With :class:`~recurl.objectives.value.TD1Estimator`, A is the return of an episode minus the baseline V. Batches,
    means, recurrent states and entries are as in :class:`A2CLoss`.

    Args:
        actor_network: policy that ends with a sampler, such as ``ProbabilisticActor(..., return_log_prob=True)``.
        critic_network: baseline, from observations (and states) to ``"state_value"``.
        loss_critic_type: distance between values and targets: ``"smooth_l1"``, ``"l1"`` or ``"l2"``.
        clip_value: maximum distance of the value from the stored ``"state_value"``. The larger of the clipped and the
            unclipped loss is used. 0 disables clipping.

    Returns a TensorDict of the two scalars.

    Raises:
        ArgumentError: see :class:`A2CLoss`.
        MissingKeyError: see :class:`A2CLoss`.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase,
        *,
        loss_critic_type: str = "smooth_l1",
        clip_value: float = 0.0,
    ) -> None:
        super().__init__(
            actor_network,
            critic_network,
            entropy_bonus=False,
            entropy_coeff=0.0,
            critic_coeff=1.0,
            loss_critic_type=loss_critic_type,
            clip_value=clip_value,
        )

    @property
    def out_keys(self) -> list[str]:  # type: ignore[override] # a property in the base class
        """Names of the losses."""
        return ["loss_actor", "loss_value"]

    def losses_of(self, batch: Step, plan: ActorCritic, keys: TensorKeys) -> dict[NestedKey, Tensor]:
        """Compute the losses; see :class:`PolicyGradientLoss`."""
        mask = mask_of(batch)
        now = self._evaluate(batch, plan, keys, mask)
        return {
            "loss_actor": self._score(now, batch, keys, mask),
            "loss_value": self._critic_loss(now, batch, keys, mask),
        }
