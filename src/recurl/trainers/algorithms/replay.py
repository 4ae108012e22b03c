"""Base of the learners from replay: buffer, slices, start states, burn-in, state refresh, priorities."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Protocol, TypeVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from recurl.data import (
    LazyTensorStorage,
    MidEpisodeBurnIn,
    PrioritizedSliceSampler,
    SliceSampler,
    TensorDictReplayBuffer,
    ZeroStart,
    refresh_states,
    slice_priorities,
)
from recurl.distributed import average_, global_statistics
from recurl.keys import DONE, NEXT, REWARD, NestedKey
from recurl.modules import RewardScaler
from recurl.spans import FORWARD, OPTIMIZER, REPLAY, span
from recurl.trainers.algorithms.learner import AgentT, Learner, Stateful
from recurl.trainers.algorithms.replay_config import ReplayConfig
from recurl.trainers.config import NO_CELL
from recurl.trainers.optim.finite import all_finite
from recurl.trainers.optim.gradient_step import GradientStep

ReplayConfigT = TypeVar("ReplayConfigT", bound=ReplayConfig)


class ReplayLoss(Protocol):
    """A loss over replayed slices."""

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries that it reads."""
        ...

    @property
    def target_states(self) -> dict[NestedKey, NestedKey]:
        """Keys of the states of target networks, by state of the network."""
        ...

    def networks(self) -> list[TensorDictModuleBase]:
        """Return the networks whose states a batch holds."""
        ...

    def target_networks(self) -> list[TensorDictModuleBase]:
        """Return the target networks."""
        ...

    def __call__(self, tensordict: TensorDictBase, /) -> TensorDictBase:
        """Return the losses, and ``td_error`` of every token."""
        ...


class ReplayLearner(Learner[ReplayConfigT, AgentT]):
    """Learns from slices of trajectories in a replay buffer; the base of DQN, SAC and TD3.

    Under torchrun each rank has a buffer of its own steps and draws its own slices; gradients are averaged.

    A subclass builds its loss over replayed slices (:meth:`make_loss`) and makes gradient steps (:meth:`improve`). The
    base stores what the loss reads, draws slices, scales rewards, starts all networks from the stored states or from
    zero, burns each network in by itself, refreshes states, and gives slices their priorities.

    Args:
        config: the options; its seed decides everything random.

    Attributes:
        buffer: the replay buffer.
        loss: what :meth:`make_loss` returned.
    """

    averaged: ClassVar[tuple[str, ...]]
    """Numbers of a gradient step, which :meth:`improve` returns; they are averaged over an update and checked."""
    collected = ("buffer", "collector")
    data_parallel = True

    def __init__(self, config: ReplayConfigT) -> None:
        super().__init__(config)
        self.loss = self.make_loss()
        self.buffer = _make_buffer(config)
        self.scaler = RewardScaler(config.gamma, (config.num_envs,)).to(config.device) if config.scale_rewards else None
        remembers = config.cell != NO_CELL
        self._memory = TensorDictSequential(*self.loss.networks()) if remembers else None
        if self._memory is not None and config.start_state == "zero":
            self.buffer.append_transform(ZeroStart(self._memory))
        self._burn_in = self._make_burn_in() if remembers and config.burn_in_steps else ()

    @abstractmethod
    def make_loss(self) -> ReplayLoss:
        """Build the loss of ``self.agent``."""

    @abstractmethod
    def improve(self, losses: TensorDictBase) -> Mapping[str, Tensor]:
        """Make a gradient step.

        Args:
            losses: what the loss returned.

        Returns:
            The numbers that ``averaged`` names, or those of them that there are, scalars without gradients.
        """

    def parts(self) -> dict[str, Stateful | None]:
        """Return what a checkpoint holds."""
        return {**super().parts(), "buffer": self.buffer, "scaler": self.scaler}

    @global_statistics()
    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Put a batch into the buffer and improve the networks on samples of it.

        Args:
            batch: what :meth:`collect` returned, ``[B, T]``.

        Returns:
            What :meth:`improve` returned, averaged over the update and the ranks (nan before learning starts), and
            :meth:`others`.
            Steps whose loss or norm wasn't finite were not made; ``fault`` names the first of these.
        """
        with span(REPLAY):
            self.buffer.extend(batch.select(*self.loss.in_keys, strict=False))
        self.agent.observe(batch)
        if self.scaler is not None:
            self.scaler.update(batch[NEXT, REWARD], batch[NEXT, DONE])
        learned = {**dict.fromkeys(self.averaged, math.nan), **self.others()}
        if self.env_steps < self.config.learning_starts:
            return self.report(learned, ())
        steps = [self._step() for _ in range(self.config.gradient_steps)]
        found = {name: [step[name] for step in steps if name in step] for name in self.averaged}
        found = {name: torch.stack(values).mean() for name, values in found.items() if values}
        values = torch.stack(list(found.values()))
        average_([values])
        learned.update(zip(found, values.tolist(), strict=True))
        return self.report(learned, list(found))

    def gradient_step(self, parameters: Iterable[nn.Parameter]) -> GradientStep:
        """Return an optimiser of ``parameters``, with the step size and the bound of the options."""
        config = self.config
        return GradientStep(parameters, learning_rate=config.learning_rate, max_norm=config.max_grad_norm)

    def others(self) -> dict[str, float]:
        """Return the numbers that are reported besides those of gradient steps."""
        return {}

    def losses(self, trained: TensorDictBase) -> TensorDictBase:
        """Return the losses of the steps to learn from."""
        return self.loss(trained)

    def _step(self) -> Mapping[str, Tensor]:
        with span(REPLAY):
            sample = self.buffer.sample().to(self.config.device)
        if self.scaler is not None:
            sample.set((NEXT, REWARD), self.scaler(sample[NEXT, REWARD]))
        if self._memory is not None and self.config.refresh_states:
            with span(REPLAY):
                refresh_states(self.buffer, sample, self._memory)
        with span(FORWARD):
            trained = self.burnt_in(sample)
            losses = self.losses(trained)
        error = losses["td_error"]
        with span(OPTIMIZER):
            numbers = self.improve(losses)
        if self.config.prioritized and all_finite([*numbers.values(), error]):
            with span(REPLAY):
                priority = slice_priorities(sample, error, trained, eta=self.config.priority_eta)
                self.buffer.update_priority(sample["index"], priority, sample["collector", "write_step"])
        return numbers

    def _make_burn_in(self) -> tuple[MidEpisodeBurnIn, ...]:
        """Return burn-ins of the networks and of their targets."""
        kinds = (self.loss.networks(), self.loss.target_networks())
        return tuple(MidEpisodeBurnIn(TensorDictSequential(*kind), self.config.burn_in_steps) for kind in kinds)

    def restart(self, rows: Tensor) -> bool:
        """Begin new episodes in some environments; see :meth:`Learner.restart`."""
        if self.scaler is not None:
            self.scaler.returns[rows] = 0
        return super().restart(rows)

    def burnt_in(self, sample: TensorDictBase) -> TensorDictBase:
        """Return the steps of a sample to learn from, each network's states computed by that network."""
        if not self._burn_in:
            return sample
        rest, target_rest = (burn_in(sample) for burn_in in self._burn_in)
        for key, at in self.loss.target_states.items():
            rest.set(at, target_rest.get(key))
        return rest


def _make_buffer(config: ReplayConfig) -> TensorDictReplayBuffer:
    by_step = config.drawn_by == "step"
    if config.prioritized:
        sampler = PrioritizedSliceSampler(
            config.buffer_size,
            config.priority_exponent,
            config.importance_exponent,
            slice_len=config.slice_length,
            strict_length=False,
            by_step=by_step,
        )
    else:
        sampler = SliceSampler(slice_len=config.slice_length, strict_length=False, by_step=by_step)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(config.buffer_size, device=config.device, ndim=2),
        sampler=sampler,
        batch_size=config.slices * config.slice_length,
    )
