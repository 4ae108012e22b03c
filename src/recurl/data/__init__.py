"""Specs, minibatches of collected data, and replay buffers.

``from recurl.data import *`` omits the spec ``Categorical``, because ``recurl.modules`` has a distribution of the
same name: import the spec explicitly.
"""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.core.specs import Binary, Bounded, Composite, MultiCategorical, OneHot, TensorSpec, Unbounded
    from recurl.core.specs import Categorical as Categorical
    from recurl.data.minibatches import SequenceMinibatches
    from recurl.data.replay_buffers import (
        BurnIn,
        LazyMemmapStorage,
        LazyTensorStorage,
        ListStorage,
        MidEpisodeBurnIn,
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
    from recurl.sequences.agents import agents_as_rows, rows_as_agents

lazy_names(
    __name__,
    {
        "recurl.core.specs": "Binary Bounded Composite MultiCategorical OneHot TensorSpec Unbounded Categorical",
        ".minibatches": "SequenceMinibatches",
        ".replay_buffers": (
            "BurnIn LazyMemmapStorage LazyTensorStorage ListStorage MidEpisodeBurnIn PrioritizedSampler "
            "PrioritizedSliceSampler RandomSampler ReplayBuffer SamplerWithoutReplacement SliceSampler "
            "TensorDictReplayBuffer ZeroStart refresh_states slice_priorities"
        ),
        "recurl.sequences.agents": "agents_as_rows rows_as_agents",
    },
)

__all__ = [
    "Binary",
    "Bounded",
    "BurnIn",
    "Composite",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MidEpisodeBurnIn",
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
    "agents_as_rows",
    "refresh_states",
    "rows_as_agents",
    "slice_priorities",
]
