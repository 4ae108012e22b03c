"""REINFORCE with a baseline, a custom algorithm: ``recurl train examples.reinforce:reinforce``."""

from dataclasses import dataclass
from typing import Any, ClassVar

from tensordict import TensorDict

from recurl.core.ranges import Fraction
from recurl.core.specs import Composite, TensorSpec
from recurl.modules import set_recurrent_mode
from recurl.objectives.value import GAE
from recurl.trainers import ActorCritic, GradientStep, Learner, RunConfig, register


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig(RunConfig):
    """Options of REINFORCE: one gradient step per batch, on returns minus the critic's values."""

    algorithm: ClassVar[str] = "reinforce"

    gae_lambda: Fraction = 1.0
    """Decay of generalized advantage estimation; 1 uses full returns."""


class Reinforce(Learner[ReinforceConfig, ActorCritic]):
    """Policy gradients with a recurrent actor and critic."""

    reported = ("loss", "grad_norm")
    live = "loss {loss:+.3f}"

    def __init__(self, config: ReinforceConfig) -> None:
        super().__init__(config)
        self.gae = GAE(gamma=config.gamma, lmbda=config.gae_lambda, value_network=self.agent.critic)
        rate, norm = config.learning_rate, config.max_grad_norm
        self.optimizer = GradientStep(self.agent.parameters(), learning_rate=rate, max_norm=norm)

    @classmethod
    def make_agent(cls, config: ReinforceConfig, observations: Composite, actions: TensorSpec) -> ActorCritic:
        """Build the networks."""
        return ActorCritic(config, observations, actions)

    def parts(self) -> dict[str, Any]:
        """Return the parts that are saved in a checkpoint."""
        return {**super().parts(), "optimizer": self.optimizer}

    def learn(self, batch: TensorDict) -> dict[str, float]:
        """Take one gradient step."""
        self.gae(batch)
        with set_recurrent_mode(True):
            log_prob = self.agent.actor.get_dist(batch).log_prob(batch["action"])
            value = self.agent.critic(batch.exclude("state_value"))["state_value"]
        loss = (batch["value_target"] - value).square().mean() - (batch["advantage"].squeeze(-1) * log_prob).mean()
        norm = self.optimizer(loss)
        self.agent.observe(batch)
        return self.report({"loss": loss.item(), "grad_norm": norm.item()})


register(ReinforceConfig, Reinforce)
