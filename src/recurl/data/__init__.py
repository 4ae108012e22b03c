"""Specs, minibatches of collected data, and replay buffers."""

from recurl.data.minibatches import SequenceMinibatches
from recurl.data.replay_buffers import (
    BurnIn,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    ZeroStart,
    refresh_states,
    slice_priorities,
)
from recurl.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, OneHot, TensorSpec, Unbounded

__all__ = [
    "Binary",
    "Bounded",
    "BurnIn",
    "Categorical",
    "Composite",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MultiCategorical",
    "OneHot",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "SamplerWithoutReplacement",
    "SequenceMinibatches",
    "SliceSampler",
    "TensorDictReplayBuffer",
    "TensorSpec",
    "Unbounded",
    "ZeroStart",
    "refresh_states",
    "slice_priorities",
]
