"""TD3 with recurrent actor and critics."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.specs import Composite, TensorSpec
from recurl.objectives import SoftUpdate, TD3Loss
from recurl.trainers.algorithms.configs import TD3Config
from recurl.trainers.algorithms.learner import Stateful
from recurl.trainers.algorithms.replay import ReplayLearner
from recurl.trainers.networks.deterministic_actor import DeterministicActor, check_bounded_actions


class TD3(ReplayLearner[TD3Config, DeterministicActor]):
    """Twin delayed deep deterministic policy gradient.

    Args:
        config: the options, including the random seed.

    Sources: Fujimoto et al., "Addressing function approximation error in actor-critic methods" (2018); with memory Ni
    et al., "Recurrent model-free RL can be a strong baseline for many POMDPs" (2022).
    """

    averaged = ("loss_actor", "loss_qvalue", "q_value", "q_target", "grad_norm_actor", "grad_norm_critic")
    reported = (*averaged, "noise")
    live = "loss {loss_actor:+.3f} (policy) {loss_qvalue:.3f} (value)  noise {noise:.2f}"
    loss: TD3Loss

    def __init__(self, config: TD3Config) -> None:
        super().__init__(config)
        self.targets = SoftUpdate(self.loss, tau=config.target_rate)
        self.delay = Delay(config.policy_delay)
        self.actor_optimizer = self.gradient_step(self.agent.actor_parameters())
        self.critic_optimizer = self.gradient_step(self.agent.critics.parameters())

    @classmethod
    def make_agent(cls, config: TD3Config, observation_spec: Composite, action_spec: TensorSpec) -> DeterministicActor:
        """Build the actor and the critics; see :meth:`Learner.make_agent`."""
        check_bounded_actions(action_spec)
        return DeterministicActor(
            config,
            observation_spec,
            action_spec,
            noise_init=config.noise_init,
            noise_end=config.noise_end,
            noise_steps=max(1, round(config.exploration_fraction * config.total_steps)),
            shared_trunk=config.shared_trunk,
            critics=config.critics,
        )

    def make_loss(self) -> TD3Loss:
        """Build the loss."""
        config, explore = self.config, self.agent.explore
        loss = TD3Loss(
            self.agent.actor,
            self.agent.critic_list(),
            bounds=(explore.low, explore.high),
            policy_noise=config.policy_noise,
            noise_clip=config.noise_clip,
            gamma=config.gamma,
            n_steps=config.n_steps,
            loss_function="l2",
        )
        return loss.to(config.device)

    def parts(self) -> dict[str, Stateful | None]:
        """Return the parts of a checkpoint."""
        return {
            **super().parts(),
            "target_critics": self.loss.target_qvalue_network,
            "target_actor": self.loss.target_actor_network,
            "delay": self.delay,
            "actor_optimizer": self.actor_optimizer,
            "critic_optimizer": self.critic_optimizer,
        }

    def collect(self) -> TensorDictBase:
        """Take ``rollout_steps`` steps in every environment and return the batch, ``[B, T]``."""
        batch = super().collect()
        self.agent.explore.step(self.frames_per_update)
        return batch

    def count(self) -> bool:
        """Count a gradient step; return whether the actor is updated too."""
        return self.delay.step()

    def update(self, kind: Hashable) -> Mapping[str, Tensor]:
        """Improve the critics, and at every second step or so actor and targets; see :meth:`ReplayLearner.update`."""
        self.loss.updates_actor = bool(kind)  # every --policy-delay steps
        sample, trained = self.sample()  # sequences from their stored states, without the burn-in
        losses = self.gradients(trained, kind)  # each loss with respect to its own parameters
        numbers = {name: losses[name] for name in self.averaged if name in losses}
        if kind:
            numbers["grad_norm_actor"] = self.actor_optimizer.descend(losses["loss_actor"])
        numbers["grad_norm_critic"] = self.critic_optimizer.descend(losses["loss_qvalue"])
        if kind:
            self.targets.step()
        self.prioritize(sample, trained, losses["td_error"], numbers)
        return numbers

    def others(self) -> dict[str, float | Tensor]:
        """Return the current standard deviation of the exploration noise."""
        return {"noise": self.agent.explore.sigma}


class Delay:
    """Counter of steps; the first step and every ``interval``-th after it are due.

    Example:
        >>> delay = Delay(2)
        >>> [delay.step() for _ in range(4)]
        [True, False, True, False]
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.steps = 0

    def step(self) -> bool:
        """Count a step and return whether it is due."""
        self.steps += 1
        return (self.steps - 1) % self.interval == 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps counted."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load a state returned by :meth:`state_dict`."""
        self.steps = state["steps"]
