"""DQN and R2D2: recurrent Q-learning from a replay buffer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from statistics import fmean

from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.specs import Composite, TensorSpec
from recurl.objectives import DQNLoss, HardUpdate, SoftUpdate
from recurl.trainers.algorithms.configs import DQNConfig
from recurl.trainers.algorithms.learner import Stateful
from recurl.trainers.algorithms.replay import ReplayLearner
from recurl.trainers.networks.q_network import QNetwork


class DQN(ReplayLearner[DQNConfig, QNetwork]):
    """Recurrent Q-learning with a target network and a replay buffer.

    Args:
        config: the options, including the random seed. R2D2 has the same options with other defaults.

    Sources: Hausknecht and Stone, "Deep recurrent Q-learning for partially observable MDPs" (2015); Kapturowski et al.,
    "Recurrent experience replay in distributed reinforcement learning" (R2D2, 2019).
    """

    averaged = ("loss", "q_value", "q_target", "grad_norm")
    reported = (*averaged, "eps")
    live = "loss {loss:.4f}  value {q_value:.3f}  eps {eps:.2f}"
    loss: DQNLoss

    def __init__(self, config: DQNConfig) -> None:
        super().__init__(config)
        self.targets = (
            SoftUpdate(self.loss, tau=config.target_rate)
            if config.target_interval is None
            else HardUpdate(self.loss, value_network_update_interval=config.target_interval)
        )
        self.optimizer = self.gradient_step(self.agent.actor.parameters())

    @classmethod
    def make_agent(cls, config: DQNConfig, observation_spec: Composite, action_spec: TensorSpec) -> QNetwork:
        """Build the Q-network; see :meth:`Learner.make_agent`."""
        eps_steps = max(1, round(config.exploration_fraction * config.total_steps))
        return QNetwork(
            config,
            observation_spec,
            action_spec,
            eps_init=config.eps_init,
            eps_end=config.eps_end,
            eps_steps=eps_steps,
        )

    def make_loss(self) -> DQNLoss:
        """Build the loss."""
        config = self.config
        return DQNLoss(
            self.agent.actor,
            gamma=config.gamma,
            n_steps=config.n_steps,
            double_dqn=config.double,
            value_rescaling=config.value_rescaling,
            greedy_returns=config.greedy_returns,
        )

    def parts(self) -> dict[str, Stateful | None]:
        """Return the parts of a checkpoint."""
        counted = self.targets if isinstance(self.targets, HardUpdate) else None
        own = {"target": self.loss.target_value_network, "targets": counted, "optimizer": self.optimizer}
        return {**super().parts(), **own}

    def collect(self) -> TensorDictBase:
        """Take ``rollout_steps`` steps in every environment and return the batch, ``[B, T]``."""
        batch = super().collect()
        self.agent.explore.step(self.frames_per_update)
        return batch

    def count(self) -> bool:
        """Count a gradient step; return whether the target network is updated after it."""
        return isinstance(self.targets, HardUpdate) and self.targets.count()

    def update(self, kind: Hashable) -> Mapping[str, Tensor]:
        """Regress the values of the actions taken on n-step targets; see :meth:`ReplayLearner.update`."""
        sample, trained = self.sample()  # sequences from their stored states, without the burn-in
        losses = self.gradients(trained)  # of the squared TD error, weighted by importance
        norm = self.optimizer.descend(losses["loss"])  # clipped; skipped if anything isn't finite
        if isinstance(self.targets, SoftUpdate):
            self.targets.step()
        elif kind:  # every --target-interval steps
            self.targets.init_()
        numbers = {**{name: losses[name] for name in ("loss", "q_value", "q_target")}, "grad_norm": norm}
        self.prioritize(sample, trained, losses["td_error"], numbers)
        return numbers

    def others(self) -> dict[str, float | Tensor]:
        """Return the current probability of a random action, averaged over the actors."""
        epsilons = self.config.epsilons
        return {"eps": fmean(epsilons) if epsilons else self.agent.explore.eps}
