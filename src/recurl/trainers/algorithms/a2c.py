"""A2C with a recurrent actor and critic."""

from __future__ import annotations

from recurl.objectives import A2CLoss
from recurl.objectives.value import GAE
from recurl.trainers.algorithms.a2c_config import A2CConfig
from recurl.trainers.algorithms.on_policy import CHECKED, OnPolicy


class A2C(OnPolicy[A2CConfig]):
    """Advantage actor-critic: one gradient step for each batch, over its rows from their stored states.

    Args:
        config: the options; its seed decides everything random.

    Source: Mnih et al., "Asynchronous methods for deep reinforcement learning" (2016), with environments side by side.
    """

    diagnostics = ("entropy",)
    reported = (*CHECKED, *diagnostics, "explained_variance")

    def make_estimator(self) -> GAE:
        """Return the estimator; see :class:`OnPolicy`."""
        config = self.config
        return GAE(config.gamma, config.gae_lambda, self.agent.critic, average_gae=config.normalize_advantages)

    def make_loss(self) -> A2CLoss:
        """Return the loss; see :class:`OnPolicy`."""
        return A2CLoss(
            self.agent.actor,
            self.agent.critic,
            entropy_coeff=self.config.entropy_coeff,
            critic_coeff=self.config.critic_coeff,
            loss_critic_type="l2",
        )
