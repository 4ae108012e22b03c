"""PPO with a recurrent actor and critic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.data import SequenceMinibatches
from recurl.keys import DONE, NEXT, REWARD
from recurl.lowering import Entries
from recurl.modules import RewardScaler
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE
from recurl.specs import Composite, TensorSpec
from recurl.trainers.algorithms.learner import Learner, Stateful
from recurl.trainers.algorithms.ppo_config import PPOConfig
from recurl.trainers.networks.actor_critic import ActorCritic
from recurl.trainers.optim.cuda_graph import CudaGraphStep
from recurl.trainers.optim.gradient_step import GradientStep

_LOSSES = ("loss_objective", "loss_critic", "loss_entropy")
_CHECKED = (*_LOSSES, "grad_norm")
_DIAGNOSTICS = ("entropy", "kl_approx", "clip_fraction", "explained_variance")
_Report: TypeAlias = tuple[Iterable[Tensor], Iterable[Tensor]]  # of a gradient step: _CHECKED, and _DIAGNOSTICS or none


class PPO(Learner[PPOConfig, ActorCritic]):
    """Proximal policy optimisation over sequences that start from stored states.

    Args:
        config: the options; its seed decides everything random.

    Source: Schulman et al., "Proximal policy optimization algorithms" (2017), with the implementation details of
    Huang et al., "The 37 implementation details of PPO" (2022): orthogonal initialisation, Adam epsilon 1e-5, annealed
    step size, advantages normalised per minibatch, gradient clipping.
    """

    reported = (*_CHECKED, *_DIAGNOSTICS)
    live = "loss {loss_objective:+.3f} (policy) {loss_critic:.3f} (value)  entropy {entropy:.2f}"

    def __init__(self, config: PPOConfig) -> None:
        self.captures = config.cuda_graph
        super().__init__(config, overlap=config.overlap)
        self.scaler = RewardScaler(config.gamma, (config.num_envs,)).to(config.device) if config.scale_rewards else None
        self.gae = GAE(gamma=config.gamma, lmbda=config.gae_lambda, value_network=self.agent.critic)
        self.loss = ClipPPOLoss(
            self.agent.actor,
            self.agent.critic,
            clip_epsilon=config.clip_epsilon,
            entropy_coeff=config.entropy_coeff,
            critic_coeff=config.critic_coeff,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        self.optimizer = GradientStep(
            self.agent.parameters(),
            learning_rate=config.learning_rate,
            max_norm=config.max_grad_norm,
            eps=1e-5,
            capturable=config.cuda_graph,
        )
        self._train = self._captured() if config.cuda_graph else self._step

    @classmethod
    def make_agent(cls, config: PPOConfig, observation_spec: Composite, action_spec: TensorSpec) -> ActorCritic:
        """Build actor and critic; see :meth:`Learner.make_agent`."""
        return ActorCritic(config, observation_spec, action_spec, shared_trunk=config.shared_trunk)

    def parts(self) -> dict[str, Stateful | None]:
        """Return what a checkpoint holds."""
        return {**super().parts(), "optimizer": self.optimizer, "scaler": self.scaler}

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Improve the networks on a batch.

        Args:
            batch: what :meth:`collect` returned, ``[B, T]``; rewards are replaced by scaled ones.

        Returns:
            Losses and gradient norm, averaged over the update; and diagnostics, averaged over its last epoch. Steps
            whose loss or norm wasn't finite were not made; ``fault`` names the first of these.
        """
        config = self.config
        if self.scaler is not None:
            self.scaler.update(batch[NEXT, REWARD], batch[NEXT, DONE])
            batch[NEXT, REWARD] = self.scaler(batch[NEXT, REWARD])
        self.gae(batch)
        data = batch.select(*self.loss.in_keys, strict=False)
        minibatches = SequenceMinibatches(data, config.minibatches, config.sequence_length)
        epochs = [self._epoch(minibatches, last=epoch == config.epochs) for epoch in range(1, config.epochs + 1)]
        self.agent.observe(batch)
        checked = _means([checked for epoch in epochs for checked, _ in epoch])
        diagnostics = _means([diagnostics for _, diagnostics in epochs[-1]])
        values = torch.cat([checked, diagnostics]).tolist()
        learned: dict[str, float] = dict(zip(self.reported, values, strict=True))
        return self.report(learned, _CHECKED)

    def _epoch(self, minibatches: SequenceMinibatches, *, last: bool) -> list[_Report]:
        """Make the gradient steps of an epoch; diagnostics are computed in the last one."""
        self.loss.metrics = last or self.config.cuda_graph  # a captured step always does the same
        return [self._train(minibatch) for minibatch in minibatches.entries()]

    def _step(self, minibatch: Entries) -> _Report:
        losses = self.loss.tensors(minibatch)
        norm = self.optimizer(cast(Tensor, sum(losses[name] for name in _LOSSES)))
        diagnostics = [losses[name] for name in _DIAGNOSTICS] if self.loss.metrics else []
        return [*(losses[name].detach() for name in _LOSSES), norm], diagnostics

    def _captured(self) -> CudaGraphStep:
        """Return the same step as a CUDA graph, in which the numbers that change are tensors."""
        for name in ("entropy_coeff", "clip_epsilon"):
            value = getattr(self.config, name)
            if value and self.config.scheduled[name] != "constant":
                setattr(self.loss, name, torch.tensor(value, device=self.config.device))

        def step(minibatch: Entries) -> tuple[Tensor, ...]:
            return tuple(torch.stack(list(numbers)) for numbers in self._step(minibatch))

        return CudaGraphStep(step, self.agent, self.optimizer.optimizer)

    def schedules(self) -> dict[str, Callable[[float], None]]:
        """Return what sets step size, entropy bonus and clip range; see :meth:`Learner.schedules`."""
        own = {name: partial(self._set_in_loss, name) for name in ("entropy_coeff", "clip_epsilon")}
        return {**super().schedules(), **own}

    def _set_in_loss(self, name: str, value: float) -> None:
        present = getattr(self.loss, name)
        if isinstance(present, Tensor):
            present.fill_(value)
        else:
            setattr(self.loss, name, value)

    def restart(self, rows: Tensor) -> bool:
        """Begin new episodes in some environments; see :meth:`Learner.restart`."""
        if self.scaler is not None:
            self.scaler.returns[rows] = 0
        return super().restart(rows)


def _means(rows: list[Any]) -> Tensor:
    """Return means over rows of scalars, one for each column."""
    return torch.stack([value for row in rows for value in row]).reshape(len(rows), -1).mean(0)
