"""Base of the learners that learn from each batch and forget it: an estimator, a loss, gradient steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.data import SequenceMinibatches
from recurl.keys import DONE, NEXT, REWARD
from recurl.lowering import Entries
from recurl.modules import RewardScaler
from recurl.objectives.policy_gradient import PolicyGradientLoss
from recurl.objectives.value.estimator import ValueEstimator
from recurl.spans import ADVANTAGES, FORWARD, GRADIENT_GRAPH, LEARNING, span
from recurl.specs import Composite, TensorSpec
from recurl.trainers.algorithms.learner import Learner, Stateful
from recurl.trainers.algorithms.on_policy_config import OnPolicyConfig
from recurl.trainers.networks.actor_critic import ActorCritic
from recurl.trainers.optim.cuda_graph import CudaGraphStep
from recurl.trainers.optim.gradient_step import GradientStep

LOSSES = ("loss_objective", "loss_critic", "loss_entropy")
CHECKED = (*LOSSES, "grad_norm")
_Report: TypeAlias = tuple[Iterable[Tensor], Iterable[Tensor]]  # of a gradient step: CHECKED, and diagnostics or none
OnPolicyT = TypeVar("OnPolicyT", bound=OnPolicyConfig)


class Passes(NamedTuple):
    """How a batch is learnt from.

    Attributes:
        epochs: passes over the batch.
        minibatches: gradient steps of each.
        sequence_length: length of the sequences that rows are cut into; whole rows when None.
    """

    epochs: int = 1
    minibatches: int = 1
    sequence_length: int | None = None


class OnPolicy(Learner[OnPolicyT, ActorCritic]):
    """Learns from each batch by an estimator of advantages and a loss, over sequences that start from stored states.

    A subclass makes both, and names the loss's metrics that it reports.

    Args:
        config: the options; its seed decides everything random.
        overlap: see :class:`Learner`.

    Attributes:
        estimator: writes advantages and value targets into each batch.
        loss: what the gradient steps descend.
        scaler: scales rewards, or None.
    """

    reported = CHECKED
    live = "loss {loss_objective:+.3f} (policy) {loss_critic:.3f} (value)  entropy {entropy:.2f}"
    diagnostics: ClassVar[tuple[str, ...]] = ("entropy", "explained_variance")
    """Metrics of the loss that are reported; the last of ``reported``."""
    scheduled_in_loss: ClassVar[tuple[str, ...]] = ("entropy_coeff",)
    """Options with a schedule that are attributes of the loss."""

    def __init__(self, config: OnPolicyT, *, overlap: bool = False) -> None:
        self.captures = config.cuda_graph
        super().__init__(config, overlap=overlap)
        self.scaler = RewardScaler(config.gamma, (config.num_envs,)).to(config.device) if config.scale_rewards else None
        self.estimator = self.make_estimator()
        self.loss = self.make_loss()
        self.optimizer = GradientStep(
            self.agent.parameters(),
            learning_rate=config.learning_rate,
            max_norm=config.max_grad_norm,
            eps=1e-5,
            capturable=config.cuda_graph,
        )
        self._train = self._captured() if config.cuda_graph else self._step

    @abstractmethod
    def make_estimator(self) -> ValueEstimator:
        """Return the estimator of the networks in ``agent``."""

    @abstractmethod
    def make_loss(self) -> PolicyGradientLoss:
        """Return the loss of the networks in ``agent``."""

    @classmethod
    def make_agent(cls, config: OnPolicyT, observation_spec: Composite, action_spec: TensorSpec) -> ActorCritic:
        """Build actor and critic; see :meth:`Learner.make_agent`."""
        return ActorCritic(config, observation_spec, action_spec, shared_trunk=config.shared_trunk)

    @property
    def passes(self) -> Passes:
        """How a batch is learnt from: by default in one gradient step."""
        return Passes()

    def measured(self, batch: TensorDictBase) -> Sequence[Tensor]:
        """Return numbers of a batch with advantages, reported between those of the gradient steps and ``diagnostics``.

        Args:
            batch: what the estimator returned, ``[B, T]``.
        """
        del batch
        return ()

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
        if self.scaler is not None:
            self.scaler.update(batch[NEXT, REWARD], batch[NEXT, DONE])
            batch[NEXT, REWARD] = self.scaler(batch[NEXT, REWARD])
        with span(ADVANTAGES):
            self.estimator(batch)
        passes = self.passes
        data = batch.select(*self.loss.in_keys, strict=False)
        minibatches = SequenceMinibatches(data, passes.minibatches, passes.sequence_length)
        epochs = [self._epoch(minibatches, last=epoch == passes.epochs) for epoch in range(1, passes.epochs + 1)]
        self.agent.observe(batch)
        checked = _means([checked for epoch in epochs for checked, _ in epoch])
        diagnostics = _means([diagnostics for _, diagnostics in epochs[-1]])
        values = torch.cat([checked, *(value.reshape(1) for value in self.measured(batch)), diagnostics]).tolist()
        return self.report(dict(zip(self.reported, values, strict=True)), CHECKED)

    def _epoch(self, minibatches: SequenceMinibatches, *, last: bool) -> list[_Report]:
        """Make the gradient steps of an epoch; diagnostics are computed in the last one."""
        self.loss.metrics = last or self.config.cuda_graph  # a captured step always does the same
        with span(GRADIENT_GRAPH if self.config.cuda_graph else LEARNING):
            return [self._train(minibatch) for minibatch in minibatches.entries()]

    def _step(self, minibatch: Entries) -> _Report:
        with span(FORWARD):
            losses = self.loss.tensors(minibatch)
        norm = self.optimizer(cast(Tensor, sum(losses[name] for name in LOSSES)))
        diagnostics = [losses[name] for name in self.diagnostics] if self.loss.metrics else []
        return [*(losses[name].detach() for name in LOSSES), norm], diagnostics

    def _captured(self) -> CudaGraphStep:
        """Return the same step as a CUDA graph, in which the numbers that change are tensors."""
        for name in self.scheduled_in_loss:
            value = getattr(self.config, name)
            if value and self.config.scheduled[name] != "constant":
                setattr(self.loss, name, torch.tensor(value, device=self.config.device))

        def step(minibatch: Entries) -> tuple[Tensor, ...]:
            return tuple(torch.stack(list(numbers)) for numbers in self._step(minibatch))

        return CudaGraphStep(step, self.agent, self.optimizer.optimizer)

    def schedules(self) -> dict[str, Callable[[float], None]]:
        """Return what sets step size and options of the loss; see :meth:`Learner.schedules`."""
        return {**super().schedules(), **{name: partial(self._set_in_loss, name) for name in self.scheduled_in_loss}}

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
