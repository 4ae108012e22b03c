"""Slices sampled from a replay buffer on the host or on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor

from recurl.core.devices import numbered
from recurl.core.keys import NestedKey
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
from recurl.data.replay_buffers.device import (
    ByPriority,
    ByStep,
    ByTrajectory,
    DeviceSliceBuffer,
    RowBurnIn,
    row_priorities,
)
from recurl.sequences.entries import Entries
from recurl.trainers.algorithms.replay_config import ReplayConfig
from recurl.trainers.config import NO_CELL
from recurl.trainers.optim.finite import all_finite

__all__ = ["DeviceSlices", "HostSlices", "ReplayLoss"]


class ReplayLoss(Protocol):
    """A loss over replayed slices."""

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys of the entries that the loss reads."""
        ...

    @property
    def target_states(self) -> dict[NestedKey, NestedKey]:
        """Keys of the target networks' states, by state key of the online network."""
        ...

    def networks(self) -> list[TensorDictModuleBase]:
        """Return the networks whose states are stored in a batch."""
        ...

    def target_networks(self) -> list[TensorDictModuleBase]:
        """Return the target networks."""
        ...

    def __call__(self, tensordict: Any, /) -> TensorDictBase:
        """Return the losses and the ``td_error`` of every token."""
        ...


class _Slices:
    """Base class of both: start states and burn-in.

    Args:
        config: the options.
        loss: the loss over the slices.
    """

    def __init__(self, config: ReplayConfig, loss: ReplayLoss) -> None:
        recurrent = config.cell != NO_CELL
        self._config = config
        self._loss = loss
        self._networks = TensorDictSequential(*loss.networks()) if recurrent else None
        self._zero = ZeroStart(self._networks) if self._networks is not None and config.start_state == "zero" else None
        kind: Any = self._burn_in_kind
        kinds = (loss.networks(), loss.target_networks()) if recurrent and config.burn_in_steps else ()
        self._burn_ins = [kind(TensorDictSequential(*networks), config.burn_in_steps) for networks in kinds]

    _burn_in_kind: type[MidEpisodeBurnIn] | type[RowBurnIn]

    def burnt_in(self, sample: Any) -> Any:
        """Burn in a sample and return its training steps, with the states of each network computed by that network."""
        if not self._burn_ins:
            return sample
        rest, target_rest = (burn_in(sample) for burn_in in self._burn_ins)
        for key, at in self._loss.target_states.items():
            rest.set(at, target_rest.get(key))
        return rest


class HostSlices(_Slices):
    """Slices sampled on the host: flat samples, ``[N]``; see :class:`_Slices` for the arguments."""

    _burn_in_kind = MidEpisodeBurnIn

    def __init__(self, config: ReplayConfig, loss: ReplayLoss) -> None:
        super().__init__(config, loss)
        self.buffer = _host_buffer(config)
        if self._zero is not None:
            self.buffer.append_transform(self._zero)

    def extend(self, batch: TensorDictBase) -> None:
        """Store a batch."""
        self.buffer.extend(batch)

    def sample(self) -> TensorDictBase:
        """Draw a sample."""
        return self.buffer.sample().to(self._config.device)

    def refresh(self, sample: TensorDictBase) -> None:
        """Write the states that the current networks compute along a sample back to the buffer, if enabled."""
        if self._networks is not None and self._config.refresh_states:
            refresh_states(self.buffer, sample, self._networks)

    def prioritize(
        self, sample: TensorDictBase, trained: TensorDictBase, error: Tensor, numbers: Mapping[str, Tensor]
    ) -> None:
        """Update the priorities of a sample from its TD errors, if enabled and if all numbers are finite.

        Args:
            sample: the sample.
            trained: its training steps, as returned by :meth:`burnt_in`.
            error: TD error of every step of ``trained``.
            numbers: metrics of the gradient step.
        """
        if self._config.prioritized and all_finite([*numbers.values(), error]):
            priority = slice_priorities(sample, error, trained, eta=self._config.priority_eta)
            self.buffer.update_priority(sample["index"], priority, sample["collector", "write_step"])


class DeviceSlices(_Slices):
    """Slices sampled on the device: samples ``[S, L]``; see :class:`_Slices` for the arguments."""

    _burn_in_kind = RowBurnIn

    def __init__(self, config: ReplayConfig, loss: ReplayLoss) -> None:
        super().__init__(config, loss)
        by_step = config.drawn_by == "step"
        drawing = ByStep() if by_step else ByTrajectory()
        if config.prioritized:
            drawing = ByPriority(config.priority_exponent, config.importance_exponent, by_step=by_step)
        self.buffer = DeviceSliceBuffer(
            config.buffer_size, config.slices, config.slice_length, drawing, numbered(config.device)
        )

    def extend(self, batch: TensorDictBase) -> None:
        """Store a batch."""
        self.buffer.extend(batch)

    def sample(self) -> Entries:
        """Draw a sample."""
        sample = self.buffer.sample()
        return sample if self._zero is None else self._zero(sample)

    def refresh(self, sample: Entries) -> None:
        """Do nothing: ``--refresh-states`` needs sampling on the host."""

    def prioritize(self, sample: Entries, trained: Entries, error: Tensor, numbers: Mapping[str, Tensor]) -> None:
        """Update priorities; see :meth:`HostSlices.prioritize`. Whether all is finite is checked on the device."""
        if self._config.prioritized:
            finite = [value.isfinite().all() for value in (*numbers.values(), error)]
            priority = row_priorities(trained, error, self._config.priority_eta)
            self.buffer.update_priority(sample, priority, torch.stack(finite).all())


def _host_buffer(config: ReplayConfig) -> TensorDictReplayBuffer:
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
