"""Replay buffers: storages and samplers, with burn-in, state refresh and priorities for recurrent training."""

from typing import TYPE_CHECKING

from recurl.core.messages import absent_names
from recurl.data.replay_buffers.buffers import ReplayBuffer
from recurl.data.replay_buffers.recurrent import BurnIn, MidEpisodeBurnIn, ZeroStart, refresh_states, slice_priorities
from recurl.data.replay_buffers.samplers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from recurl.data.replay_buffers.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage
from recurl.data.replay_buffers.tensordict_buffer import TensorDictReplayBuffer

if not TYPE_CHECKING:  # type checkers assume that a module with __getattr__ has every name
    __getattr__ = absent_names(__name__)

__all__ = [
    "BurnIn",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MidEpisodeBurnIn",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "Storage",
    "TensorDictReplayBuffer",
    "ZeroStart",
    "refresh_states",
    "slice_priorities",
]
