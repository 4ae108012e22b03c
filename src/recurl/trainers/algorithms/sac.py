"""SAC with recurrent actor and critics."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

from recurl.core.specs import Composite, TensorSpec
from recurl.objectives import DiscreteSACLoss, SACLoss, SoftUpdate
from recurl.trainers.algorithms.configs import SACConfig
from recurl.trainers.algorithms.learner import Stateful
from recurl.trainers.algorithms.replay import ReplayLearner
from recurl.trainers.networks.soft_actor import SoftActor, check_soft_actions

_LOSSES = ("loss_actor", "loss_qvalue")
_DIAGNOSTICS = ("alpha", "entropy", "q_value", "q_target")


class SAC(ReplayLearner[SACConfig, SoftActor]):
    """Soft actor-critic with twin critics, target critics, and a learned temperature.

    Args:
        config: the options, including the random seed.

    Sources: Haarnoja et al., "Soft actor-critic algorithms and applications" (2018); Christodoulou, "Soft actor-critic
    for discrete action settings" (2019); with memory Ni et al., "Recurrent model-free RL can be a strong baseline for
    many POMDPs" (2022).
    """

    averaged = (*_LOSSES, *_DIAGNOSTICS, "grad_norm_actor", "grad_norm_critic")
    reported = averaged
    live = "loss {loss_actor:+.3f} (policy) {loss_qvalue:.3f} (value)  entropy {entropy:.2f}  alpha {alpha:.3f}"
    loss: SACLoss | DiscreteSACLoss

    def __init__(self, config: SACConfig) -> None:
        super().__init__(config)
        self.targets = SoftUpdate(self.loss, tau=config.target_rate)
        self.actor_optimizer = self.gradient_step(self.agent.actor_parameters())
        self.critic_optimizer = self.gradient_step(self.agent.critics.parameters())
        self.alpha_optimizer = None if config.fixed_alpha else self.gradient_step(self.loss.temperature.parameters())

    @classmethod
    def make_agent(cls, config: SACConfig, observation_spec: Composite, action_spec: TensorSpec) -> SoftActor:
        """Build the actor and the critics; see :meth:`Learner.make_agent`."""
        check_soft_actions(action_spec)
        return SoftActor(
            config, observation_spec, action_spec, shared_trunk=config.shared_trunk, critics=config.critics
        )

    def make_loss(self) -> SACLoss | DiscreteSACLoss:
        """Build the loss for continuous or discrete actions."""
        config = self.config
        options: dict[str, Any] = {
            "alpha_init": config.alpha,
            "fixed_alpha": config.fixed_alpha,
            "target_entropy": "auto" if config.target_entropy is None else config.target_entropy,
            "gamma": config.gamma,
            "n_steps": config.n_steps,
            "loss_function": "l2",
        }
        networks = self.agent.actor, self.agent.critic_list()
        if self.agent.chooses:
            loss = DiscreteSACLoss(*networks, target_entropy_weight=config.target_entropy_fraction, **options)
        else:
            loss = SACLoss(*networks, **options)
        return loss.to(config.device)

    def parts(self) -> dict[str, Stateful | None]:
        """Return the parts of a checkpoint."""
        return {
            **super().parts(),
            "target": self.loss.target_qvalue_network,
            "temperature": self.loss.temperature,
            "actor_optimizer": self.actor_optimizer,
            "critic_optimizer": self.critic_optimizer,
            "alpha_optimizer": self.alpha_optimizer,
        }

    def update(self, kind: Hashable) -> Mapping[str, Tensor]:
        """Improve actor, critics and temperature by one step each; see :meth:`ReplayLearner.update`."""
        sample, trained = self.sample()  # sequences from their stored states, without the burn-in
        losses = self.gradients(trained)  # of all three losses, each with respect to its own parameters
        numbers = {name: losses[name] for name in (*_LOSSES, *_DIAGNOSTICS)}
        numbers["grad_norm_actor"] = self.actor_optimizer.descend(losses["loss_actor"])
        numbers["grad_norm_critic"] = self.critic_optimizer.descend(losses["loss_qvalue"])
        if self.alpha_optimizer is not None:
            self.alpha_optimizer.descend(losses["loss_alpha"])
        self.targets.step()  # the target critics follow slowly
        self.prioritize(sample, trained, losses["td_error"], numbers)
        return numbers
