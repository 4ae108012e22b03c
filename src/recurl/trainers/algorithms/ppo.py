"""PPO with a recurrent actor-critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.keys import MASK
from recurl.distributed import average_
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE
from recurl.trainers.algorithms.configs import PPOConfig
from recurl.trainers.algorithms.on_policy import CHECKED, OnPolicy, UpdateSchedule
from recurl.trainers.algorithms.schedules import adapted_rate
from recurl.trainers.config import ADAPTIVE


class PPO(OnPolicy[PPOConfig]):
    """Proximal policy optimization over sequences that start from stored states.

    Args:
        config: the options, including the random seed.

    Source: Schulman et al., "Proximal policy optimization algorithms" (2017), with the implementation details of
    Huang et al., "The 37 implementation details of PPO" (2022): orthogonal initialization, Adam epsilon 1e-5, annealed
    learning rate, advantages normalized per minibatch, gradient clipping.
    """

    diagnostics = ("entropy", "kl_approx", "clip_fraction")
    reported = (*CHECKED, *diagnostics, "explained_variance")
    scheduled_in_loss = ("entropy_coeff", "clip_epsilon")

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config, overlap=config.overlap)
        self._adapts = config.learning_rate_schedule == ADAPTIVE
        if self._adapts:
            self.reported = (*self.reported, "learning_rate")

    def make_estimator(self) -> GAE:
        """Build the advantage estimator."""
        return GAE(gamma=self.config.gamma, lmbda=self.config.gae_lambda, value_network=self.agent.critic)

    def make_loss(self) -> ClipPPOLoss:
        """Build the loss."""
        config = self.config
        return ClipPPOLoss(
            self.agent.actor,
            self.agent.critic,
            clip_epsilon=config.clip_epsilon,
            entropy_coeff=config.entropy_coeff,
            critic_coeff=config.critic_coeff,
            loss_critic_type="l2",
            normalize_advantage=True,
            clip_value=config.clip_value,
        )

    @property
    def passes(self) -> UpdateSchedule:
        """Epochs, minibatches and sequence length of an update."""
        return UpdateSchedule(self.config.epochs, self.config.minibatches, self.config.sequence_length)

    def update(self, batch: TensorDictBase, orders: Tensor | None = None) -> Tensor:
        """Maximize the clipped surrogate objective in epochs over minibatches of sequences.

        See :meth:`OnPolicy.update`.
        """
        explained = self.write_advantages(batch)  # once, from the critic that collected the batch
        gradients = self.gradients()
        epochs: list[list[tuple[Mapping[Any, Tensor], Tensor]]] = []
        for minibatches in self.epochs(batch, orders):
            epochs.append([])
            last = len(epochs) == self.config.epochs
            wanted = last or self._adapts or self.config.compile  # compiled code has them
            self.loss.metrics = self.diagnostics if wanted else False
            for minibatch in minibatches:  # whole sequences, each from its stored state
                mask = None if self.config.cuda_graph else minibatch.get(MASK, None)
                if mask is not None and not mask.any():  # no agent takes part
                    continue
                losses = gradients(minibatch)  # of the clipped objective, the value loss and the entropy bonus
                if self._adapts and (len(epochs) > 1 or epochs[-1]):  # at the first step, only rounding differs
                    self._adapt(losses["kl_approx"])
                norm = self.optimizer.descend(self.total(losses))  # clipped; skipped if anything isn't finite
                epochs[-1].append((losses, norm))
        found = self.summary(batch, explained, epochs)
        return torch.cat([found, self._rate.reshape(1)]) if self._adapts else found

    @property
    def _rate(self) -> Tensor:
        return cast(Tensor, self.optimizer.learning_rate)  # adaptive, so on the device

    def _adapt(self, kl: Tensor) -> None:
        """Adapt the learning rate to the KL divergence of a minibatch, the mean over the ranks."""
        average_([kl := kl.clone()])
        self.optimizer.set_learning_rate(adapted_rate(self._rate, kl, self.config.target_kl))
