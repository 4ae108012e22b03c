"""Samplers, which select the stored steps of a batch."""

from typing import TYPE_CHECKING

from recurl.core.messages import absent_names
from recurl.data.replay_buffers.samplers.base import RandomSampler, Sampler, SamplerWithoutReplacement
from recurl.data.replay_buffers.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from recurl.data.replay_buffers.samplers.slices import SliceSampler

if not TYPE_CHECKING:  # type checkers assume that a module with __getattr__ has every name
    __getattr__ = absent_names(__name__)

__all__ = [
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
]
