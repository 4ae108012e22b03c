"""Prioritized samplers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, UsageError
from recurl.data import LazyTensorStorage, TensorDictReplayBuffer
from recurl.data.replay_buffers.samplers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
)
from tests.data.replay_buffers.slices import buffer_of, counted, drawn_slices, steps


@pytest.mark.parametrize("alpha", [0.0, 1.0, 0.6])
def test_priorities_against_the_formula(alpha):
    beta, eps = 0.4, 1e-3
    buffer = buffer_of(PrioritizedSampler(50, alpha, beta, eps), [20], 20_000, max_size=20)
    priority = torch.arange(20.0)
    buffer.update_priority(torch.arange(20), priority)
    wanted = (priority.double() + eps) ** alpha
    wanted /= wanted.sum()
    sample = buffer.sample()
    counts = torch.bincount(sample["index"], minlength=20).double()
    keep = wanted * 20_000 > 5
    chi = ((counts - wanted * 20_000) ** 2 / (wanted * 20_000))[keep].sum()
    assert chi < 19 + 4.5 * 38**0.5
    weight = (wanted / wanted.min()) ** -beta
    torch.testing.assert_close(sample["priority_weight"], weight[sample["index"]].float())
    buffer.extend(steps([1]))
    assert buffer.sampler.state_dict()["tree"][0] == pytest.approx((19 + eps) ** alpha, rel=1e-12), (
        "new steps have the largest priority"
    )
    buffer.update_priority(torch.tensor([3, 3, 3]), torch.tensor([[1.0], [7.0], [2.0]]))
    assert buffer.sampler.state_dict()["tree"][3] == pytest.approx((7 + eps) ** alpha, rel=1e-12), (
        "the largest of several counts"
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.booleans(), st.booleans())
def test_priorities_of_slices_against_a_naive_buffer(seed, strict, by_number):
    """Which steps can start a slice, and with what probability, by brute force after every change."""
    random = np.random.default_rng(seed)
    lanes, capacity, length, slices = random.integers(1, 3), random.integers(4, 16), random.integers(1, 5), 6
    size = int(lanes * capacity)
    count = {"num_slices": slices} if by_number else {"slice_len": int(length)}
    sampler = PrioritizedSliceSampler(size, 0.7, 0.5, 1e-4, strict_length=strict, **count)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(size, ndim=2), sampler=sampler, batch_size=int(slices * length)
    )
    priorities, largest = {}, 1.0
    history = [[] for _ in range(lanes)]
    for _ in range(6):
        new = int(random.integers(1, capacity + 1))
        ids = np.zeros((lanes, new), np.int64)
        for lane, past in enumerate(history):
            for column in range(new):
                last = past[-1] if past else lane
                past.append(last + int(lanes) * int(random.random() < 0.25))
                ids[lane, column] = past[-1]
        index = buffer.extend(TensorDict({"collector": {"traj_ids": torch.from_numpy(ids)}}, ids.shape))
        for place in index.reshape(-1).tolist():
            priorities[place] = largest
        chosen = random.choice(sorted(priorities), min(5, len(priorities)), replace=False)
        values = random.random(chosen.size) * 3
        buffer.update_priority(torch.from_numpy(chosen), torch.from_numpy(values))
        largest = max(largest, values.max())
        priorities.update(zip(chosen.tolist(), values.tolist(), strict=True))
        expected = naive_starts(history, int(capacity), int(length), strict)
        if not expected:
            with pytest.raises(UsageError, match="No stored trajectory"):
                buffer.sample()
            continue
        sample = buffer.sample()
        got = sampler.state_dict()["tree"].numpy()
        wanted = np.zeros(size)
        for place in expected:
            wanted[place] = (priorities[place] + 1e-4) ** 0.7
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=0)
        pieces = drawn_slices(sample)
        assert all(len(piece) == expected[piece[0]] for piece in pieces)
        first = np.repeat([piece[0] for piece in pieces], [len(piece) for piece in pieces])
        weight = (wanted[first] / min(wanted[wanted > 0])) ** -0.5
        np.testing.assert_allclose(sample["priority_weight"].numpy(), weight, rtol=1e-6)


def naive_starts(history, capacity, length, strict):
    """Return the positions at which a slice can start, with its length."""
    result = {}
    for lane, ids in enumerate(history):
        oldest = max(0, len(ids) - capacity)
        for step in range(oldest, len(ids)):
            stop = step
            while stop < len(ids) and ids[stop] == ids[step]:
                stop += 1
            whole = step == oldest or ids[step - 1] != ids[step]
            if stop - step >= length or (whole and not strict):
                result[lane * capacity + step % capacity] = min(length, stop - step)
    return result


def test_slices_are_drawn_by_the_priority_of_their_start():
    buffer = buffer_of(PrioritizedSliceSampler(20, 1.0, 1.0, slice_len=3), [6, 6], 3 * 8000, max_size=12)
    buffer.update_priority(torch.arange(12), torch.tensor([1.0, 0, 2, 1, 9, 9, 0, 0, 4, 0, 9, 9]))
    begins = counted(piece[0] for piece in drawn_slices(buffer.sample()))
    wanted = {0: 1000, 2: 2000, 3: 1000, 8: 4000}
    assert begins.keys() == wanted.keys()
    assert sum((begins[key] - value) ** 2 / value for key, value in wanted.items()) < 16.3  # p = 0.001


def test_errors_of_priorities():
    nan, inf = float("nan"), float("inf")
    for options in (
        *({"max_capacity": 0}, {"alpha": -1.0}, {"beta": -0.1}, {"eps": 0.0}),
        *({name: value} for name in ("alpha", "beta", "eps") for value in (nan, inf)),
    ):
        with pytest.raises(ArgumentError, match="max_capacity and eps must be positive"):
            PrioritizedSampler(**({"max_capacity": 10, "alpha": 1.0, "beta": 1.0} | options))
    with pytest.raises(ArgumentError, match="max_capacity=10 must be at least the storage's max_size"):
        buffer_of(PrioritizedSampler(10, 1.0, 1.0), [5], 4, max_size=11)
    buffer = buffer_of(PrioritizedSampler(10, 1.0, 1.0), [5], 4, max_size=10)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="Priorities must be finite and not negative"):
            buffer.update_priority(torch.tensor([0]), torch.tensor([bad]))
    with pytest.raises(ArgumentError, match="one priority per step"):
        buffer.update_priority(torch.tensor([0]), torch.ones(2))
    buffer.update_priority(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    with pytest.raises(UsageError, match="RandomSampler has no priorities"):
        buffer_of(RandomSampler(), [5], 4).update_priority(torch.tensor([0]), torch.ones(1))
