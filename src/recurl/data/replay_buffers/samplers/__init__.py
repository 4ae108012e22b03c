"""Samplers, which choose the stored steps of a batch."""

from recurl.data.replay_buffers.samplers.base import RandomSampler, Sampler, SamplerWithoutReplacement
from recurl.data.replay_buffers.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from recurl.data.replay_buffers.samplers.slices import SliceSampler

__all__ = [
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
]
