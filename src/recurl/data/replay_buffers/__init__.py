"""Replay buffers: storages and samplers, with burn-in, state refresh and priorities for recurrent training."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.data.replay_buffers.buffers import ReplayBuffer
    from recurl.data.replay_buffers.recurrent import (
        BurnIn,
        MidEpisodeBurnIn,
        ZeroStart,
        refresh_states,
        slice_priorities,
    )
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

lazy_names(
    __name__,
    {
        ".buffers": "ReplayBuffer",
        ".recurrent": "BurnIn MidEpisodeBurnIn ZeroStart refresh_states slice_priorities",
        ".samplers": (
            "PrioritizedSampler PrioritizedSliceSampler RandomSampler Sampler SamplerWithoutReplacement SliceSampler"
        ),
        ".storages": "LazyMemmapStorage LazyTensorStorage ListStorage Storage",
        ".tensordict_buffer": "TensorDictReplayBuffer",
    },
)

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
