"""A2C with a recurrent actor-critic."""

from __future__ import annotations

from recurl.objectives import A2CLoss
from recurl.objectives.value import GAE
from recurl.trainers.algorithms.configs import A2CConfig
from recurl.trainers.algorithms.on_policy import CHECKED, OnPolicy


class A2C(OnPolicy[A2CConfig]):
    """Advantage actor-critic: one gradient step per batch, over whole rows that start from their stored states.

    Args:
        config: the options, including the random seed.

    Source: Mnih et al., "Asynchronous methods for deep reinforcement learning" (2016), with synchronous parallel
    environments.
    """

    diagnostics = ("entropy",)
    reported = (*CHECKED, *diagnostics, "explained_variance")

    def make_estimator(self) -> GAE:
        """Build the advantage estimator."""
        config = self.config
        return GAE(config.gamma, config.gae_lambda, self.agent.critic, average_gae=config.normalize_advantages)

    def make_loss(self) -> A2CLoss:
        """Build the loss."""
        return A2CLoss(
            self.agent.actor,
            self.agent.critic,
            entropy_coeff=self.config.entropy_coeff,
            critic_coeff=self.config.critic_coeff,
            loss_critic_type="l2",
        )
