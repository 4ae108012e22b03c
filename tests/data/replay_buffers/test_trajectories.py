from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recurl.core.errors import ArgumentError
from recurl.data.replay_buffers.trajectories import TrajectoryIndex, below


class Naive:
    """The stored steps of each lane as plain lists of (step number, run number)."""

    def __init__(self, lanes, capacity):
        self.lanes = [[] for _ in range(lanes)]
        self.capacity = capacity
        self.runs = 0

    def append(self, starts):
        for lane, row in zip(self.lanes, starts.tolist(), strict=True):
            for start in row:
                if start or not lane:
                    self.runs += 1
                    run = self.runs
                else:
                    run = lane[-1][1]
                lane.append((lane[-1][0] + 1 if lane else 0, run))
                del lane[: -self.capacity]

    def stretches(self):
        """(lane, first, stop) of every run."""
        found = {}
        for number, lane in enumerate(self.lanes):
            for step, run in lane:
                first, _ = found.get((number, run), (step, step))
                found[number, run] = (first, step + 1)
        return sorted((lane, *span) for (lane, _), span in found.items())


@st.composite
def histories(draw):
    lanes, capacity = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    counts = draw(st.lists(st.integers(0, capacity), min_size=1, max_size=12))
    density = draw(st.sampled_from([0.0, 0.1, 0.4, 1.0]))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    return lanes, capacity, [torch.from_numpy(random.random((lanes, count)) < density) for count in counts]


@settings(deadline=None, max_examples=150)
@given(histories(), st.integers(1, 5))
def test_against_plain_lists(history, length):
    lanes, capacity, appends = history
    index, naive = TrajectoryIndex(lanes, capacity), Naive(lanes, capacity)
    for number, starts in enumerate(appends):
        if number == len(appends) // 2:
            state = index.state_dict()
            index = TrajectoryIndex(lanes, capacity)
            index.load_state_dict(state)
        before = index.written.clone()
        positions = index.append(starts)
        naive.append(starts)
        assert positions.shape == starts.shape
        assert torch.equal(index.steps(positions), (before + torch.arange(starts.shape[1])).expand(starts.shape))
        check(index, naive, length)


def check(index, naive, length):
    stretches = naive.stretches()
    if len(index):
        counts = index.run_counts()
        every = index.nth_run(torch.arange(int(counts.sum())), counts)
        assert list(zip(*(part.tolist() for part in index.bounds(every)), strict=True)) == stretches
    for minimum in (1, length):
        runs = index.runs_of(minimum)
        members = runs.members[: runs.count].long()
        got = sorted(zip(*(part.tolist() for part in index.bounds(members)), strict=True))
        assert got == [(lane, first, stop) for lane, first, stop in stretches if stop - first >= minimum]
    assert index.longest() == max((stop - first for _, first, stop in stretches), default=0)
    stored = index.all_positions()
    assert len(index) == len(stored) == sum(map(len, naive.lanes))
    if len(stored):
        assert torch.equal(index.nth_position(torch.arange(len(stored))), stored)
    run_of = {(lane, step): run for lane, steps in enumerate(naive.lanes) for step, run in steps}
    where = list(zip((stored // index.capacity).tolist(), index.steps(stored).tolist(), strict=True))
    assert sorted(where) == sorted(run_of)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(len(stored)), 2))
    order = torch.from_numpy(np.concatenate([order, np.arange(len(stored))]))
    expected = [False] * bool(len(order))
    for a, b in itertools.pairwise(order.tolist()):
        (lane, step), (other, later) = where[a], where[b]
        expected.append(lane == other and later == step + 1 and run_of[where[a]] == run_of[where[b]])
    assert index.continues(stored[order]).tolist() == expected
    following, exists = index.successors(stored)
    for place, position, there in zip(where, following.tolist(), exists.tolist(), strict=True):
        after = (place[0], place[1] + 1)
        assert there == (after in run_of and run_of[after] == run_of[place])
        assert not there or where[stored.tolist().index(position)] == after


def test_too_much_at_once():
    with pytest.raises(ArgumentError, match="5 steps can't be stored at once, as there is room for 4"):
        TrajectoryIndex(2, 4).append(torch.zeros(2, 5, dtype=torch.bool))


class Largest(TorchDispatchMode):
    """Records the size of the largest new tensor."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        given = {value.data_ptr() for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        new = [value for value in tree_leaves(found) if isinstance(value, torch.Tensor)]
        self.size = max([self.size, *(value.numel() for value in new if value.data_ptr() not in given)])
        return found


def test_the_cost_of_an_append_does_not_depend_on_the_stored_steps():
    """The size of tensors when appending or drawing is bounded by the new steps, not by the stored ones."""
    index = TrajectoryIndex(1, 200_000)
    for _ in range(11):
        index.append((torch.arange(20_000) % 20 == 0)[None])
    index.runs_of(5)
    with Largest() as largest:
        for _ in range(100):
            index.append((torch.arange(32) % 20 == 0)[None])
            index.bounds(index.nth_run(torch.arange(8), index.run_counts()))
            index.nth_position(torch.arange(8))
    assert 0 < largest.size <= 80


def test_integers_are_uniform_and_in_range():
    limits = torch.tensor([1, 3, 10**8])
    draws = below(limits, torch.rand(6000, 3, dtype=torch.float64))
    assert (draws >= 0).all()
    assert (draws < limits).all()
    counts = draws[:, 1].bincount(minlength=3)
    assert ((counts - 2000) ** 2 / 2000).sum() < 13.8  # chi-square, 2 degrees of freedom, p = 0.001
    assert below(limits, torch.full((3,), 1.0, dtype=torch.float64)).tolist() == [0, 2, 10**8 - 1]
