"""Samplers, which select the stored steps of a batch."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.data.replay_buffers.samplers.base import RandomSampler, Sampler, SamplerWithoutReplacement
    from recurl.data.replay_buffers.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
    from recurl.data.replay_buffers.samplers.slices import SliceSampler

lazy_names(
    __name__,
    {
        ".base": "RandomSampler Sampler SamplerWithoutReplacement",
        ".prioritized": "PrioritizedSampler PrioritizedSliceSampler",
        ".slices": "SliceSampler",
    },
)

__all__ = [
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
]
