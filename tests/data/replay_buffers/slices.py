"""Buffers of short trajectories, and the slices drawn from them."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from recurl.data import LazyTensorStorage, TensorDictReplayBuffer


def steps(lengths, first=0):
    """Return steps of trajectories of these lengths; "step" numbers all steps, "episode" the trajectories."""
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) + first
    step = torch.arange(len(episode))
    done = torch.ones(len(episode), 1, dtype=torch.bool)
    done[:-1, 0] = episode[1:] != episode[:-1]
    return TensorDict(
        {
            "step": step,
            "episode": episode,
            "is_init": torch.cat([torch.ones(1, 1, dtype=torch.bool), done[:-1]]),
            "next": {"done": done, "terminated": done, "truncated": torch.zeros_like(done)},
        },
        [len(episode)],
    )


def buffer_of(sampler, lengths, batch_size, max_size=1000):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(max_size), sampler=sampler, batch_size=batch_size)
    buffer.extend(steps(lengths))
    return buffer


def drawn_slices(sample):
    """Return the slices of a flat sample, without padding, as lists of positions."""
    starts = sample["is_init"].reshape(-1).nonzero().reshape(-1).tolist()
    mask = sample.get(("collector", "mask"), torch.ones(len(sample), dtype=torch.bool))
    pieces = [sample["index"][a:b] for a, b in zip(starts, [*starts[1:], len(sample)], strict=True) if mask[a]]
    return [piece.tolist() for piece in pieces]


def counted(values):
    result = {}
    for value in values:
        result[value] = result.get(value, 0) + 1
    return result
