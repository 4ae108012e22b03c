"""IMPALA with a recurrent actor-critic."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import TensorDictBase
from torch import Tensor

from recurl.objectives import A2CLoss, ClipPPOLoss
from recurl.objectives.policy_gradient import PolicyGradientLoss
from recurl.objectives.value import VTrace
from recurl.trainers.algorithms.configs import ImpalaConfig
from recurl.trainers.algorithms.on_policy import CHECKED, OnPolicy


class Impala(OnPolicy[ImpalaConfig]):
    """Actor-critic that learns from batches of older policies, with V-trace corrections of values and gradients.

    Each batch is used for one gradient step, over whole rows that start from their stored states.

    Args:
        config: the options, including the random seed.

    Sources: Espeholt et al., "IMPALA: scalable distributed deep-RL with importance weighted actor-learner
    architectures" (2018); for the clipped ratio, Petrenko et al., "Sample Factory" (2020), section 3.4 (APPO).
    """

    diagnostics = ("entropy",)
    reported = (*CHECKED, "kl_behaviour", "importance_weight", *diagnostics, "explained_variance")

    def __init__(self, config: ImpalaConfig) -> None:
        super().__init__(config, overlap=config.overlap)

    def make_estimator(self) -> VTrace:
        """Build the value estimator."""
        config = self.config
        return VTrace(
            config.gamma,
            self.agent.actor,
            self.agent.critic,
            rho_thresh=config.rho_thresh,
            c_thresh=config.c_thresh,
            average_adv=config.normalize_advantages,
            weight_advantage=config.clip_epsilon is None,
        )

    def make_loss(self) -> PolicyGradientLoss:
        """Build the loss."""
        config, networks = self.config, (self.agent.actor, self.agent.critic)
        if config.clip_epsilon is None:
            return A2CLoss(
                *networks,
                entropy_coeff=config.entropy_coeff,
                critic_coeff=config.critic_coeff,
                loss_critic_type="l2",
            )
        return ClipPPOLoss(
            *networks,
            clip_epsilon=config.clip_epsilon,
            entropy_coeff=config.entropy_coeff,
            critic_coeff=config.critic_coeff,
            loss_critic_type="l2",
        )

    def measured(self, batch: TensorDictBase) -> Sequence[Tensor]:
        """Return the KL divergence between behavior and current policy, and the mean truncated importance weight."""
        weight = batch[self.estimator.tensor_keys.importance_weight]
        return (weight - 1.0 - weight.log()).mean(), weight.clamp(max=self.config.rho_thresh).mean()
