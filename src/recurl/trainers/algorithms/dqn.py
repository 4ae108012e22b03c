"""DQN and R2D2: Q-learning with a recurrent network, from replayed slices of trajectories."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.data import (
    LazyTensorStorage,
    MidEpisodeBurnIn,
    PrioritizedSliceSampler,
    SliceSampler,
    TensorDictReplayBuffer,
    ZeroStart,
    slice_priorities,
)
from recurl.objectives import DQNLoss, HardUpdate
from recurl.specs import Composite, TensorSpec
from recurl.trainers.algorithms.dqn_config import DQNConfig
from recurl.trainers.algorithms.learner import Learner, Stateful
from recurl.trainers.config import NO_CELL
from recurl.trainers.networks.q_network import QNetwork
from recurl.trainers.optim.finite import all_finite
from recurl.trainers.optim.gradient_step import GradientStep

_REPORTED = ("loss", "q_value", "q_target")
_CHECKED = (*_REPORTED, "grad_norm")


class DQN(Learner[DQNConfig, QNetwork]):
    """Q-learning with a target network and a replay buffer.

    Args:
        config: the options; its seed decides everything random. Those of R2D2 are the same with other defaults.

    Sources: Hausknecht and Stone, "Deep recurrent Q-learning for partially observable MDPs" (2015); Kapturowski et al.,
    "Recurrent experience replay in distributed reinforcement learning" (R2D2, 2019).
    """

    reported = (*_CHECKED, "eps")
    live = "loss {loss:.4f}  value {q_value:.3f}  eps {eps:.2f}"
    collected = ("buffer", "collector")

    def __init__(self, config: DQNConfig) -> None:
        super().__init__(config)
        self.loss = DQNLoss(
            self.agent.actor,
            gamma=config.gamma,
            n_steps=config.n_steps,
            double_dqn=config.double,
            value_rescaling=config.value_rescaling,
        )
        self.targets = HardUpdate(self.loss, value_network_update_interval=config.target_interval)
        self.optimizer = GradientStep(
            self.agent.actor.parameters(), learning_rate=config.learning_rate, max_norm=config.max_grad_norm
        )
        self.buffer = _make_buffer(config)
        if config.cell != NO_CELL and config.start_state == "zero":
            self.buffer.append_transform(ZeroStart(self.agent.actor))
        self._burn_in = self._make_burn_in()

    @classmethod
    def make_agent(cls, config: DQNConfig, observation_spec: Composite, action_spec: TensorSpec) -> QNetwork:
        """Build the network; see :meth:`Learner.make_agent`."""
        eps_steps = max(1, round(config.exploration_fraction * config.total_steps))
        return QNetwork(
            config,
            observation_spec,
            action_spec,
            eps_init=config.eps_init,
            eps_end=config.eps_end,
            eps_steps=eps_steps,
        )

    def parts(self) -> dict[str, Stateful | None]:
        """Return what a checkpoint holds."""
        return {
            **super().parts(),
            "target": self.loss.target_value_network,
            "targets": self.targets,
            "optimizer": self.optimizer,
            "buffer": self.buffer,
        }

    def collect(self) -> TensorDictBase:
        """Take ``rollout_steps`` steps in every environment and return the batch, ``[B, T]``."""
        batch = super().collect()
        self.agent.explore.step(batch.numel())
        return batch

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Put a batch into the buffer and improve the network on samples of it.

        Args:
            batch: what :meth:`collect` returned, ``[B, T]``.

        Returns:
            Loss, mean value of the actions taken and mean target, averaged over the update (nan before learning
            starts), the norm of the gradient, and the present probability of a random action. Steps whose loss or norm
            wasn't finite were not made; ``fault`` names the first of these.
        """
        self.buffer.extend(batch.select(*self.loss.in_keys, strict=False))
        self.agent.observe(batch)
        learned = {**dict.fromkeys(_CHECKED, math.nan), "eps": self.agent.explore.eps.item()}
        if self.env_steps < self.config.learning_starts:
            return self.report(learned, ())
        mean = torch.stack([self._step() for _ in range(self.config.gradient_steps)]).mean(0)
        learned.update(zip(_CHECKED, mean.tolist(), strict=True))
        return self.report(learned, _CHECKED)

    def _step(self) -> Tensor:
        sample = self.buffer.sample().to(self.config.device)
        trained = self._burnt_in(sample)
        losses = self.loss(trained)
        norm = self.optimizer(losses["loss"])
        self.targets.step()
        if self.config.prioritized and all_finite([norm, losses["td_error"]]):
            priority = slice_priorities(sample, losses["td_error"], trained, eta=self.config.priority_eta)
            self.buffer.update_priority(sample["index"], priority, sample["collector", "write_step"])
        return torch.stack([*(losses[name].detach() for name in _REPORTED), norm])

    def _make_burn_in(self) -> tuple[MidEpisodeBurnIn, ...]:
        """Return burn-ins of the network and of its target, if there are any."""
        steps = self.config.burn_in
        if self.config.cell == NO_CELL or steps == 0:
            return ()
        return tuple(MidEpisodeBurnIn(network, steps) for network in (self.agent.actor, self.loss.target_value_network))

    def _burnt_in(self, sample: TensorDictBase) -> TensorDictBase:
        """Return the steps to learn from, each network's states computed by that network."""
        if not self._burn_in:
            return sample
        rest, target_rest = (burn_in(sample) for burn_in in self._burn_in)
        for key, at in self.loss.target_states.items():
            rest.set(at, target_rest.get(key))
        return rest


def _make_buffer(config: DQNConfig) -> TensorDictReplayBuffer:
    if config.prioritized:
        sampler = PrioritizedSliceSampler(
            config.buffer_size,
            config.priority_exponent,
            config.importance_exponent,
            slice_len=config.slice_length,
            strict_length=False,
        )
    else:
        sampler = SliceSampler(slice_len=config.slice_length, strict_length=False)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(config.buffer_size, device=config.device, ndim=2),
        sampler=sampler,
        batch_size=config.slices * config.slice_length,
    )
