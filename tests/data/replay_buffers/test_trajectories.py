from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recurl.core.errors import ArgumentError
from recurl.data.replay_buffers.trajectories import TrajectoryIndex, random_below


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
    return lanes, capacity, [random.random((lanes, count)) < density for count in counts]


@settings(deadline=None, max_examples=150)
@given(histories(), st.integers(1, 5))
def test_against_plain_lists(history, length):
    lanes, capacity, appends = history
    index, naive = TrajectoryIndex(lanes, capacity), Naive(lanes, capacity)
    for number, starts in enumerate(appends):
        if number == len(appends) // 2:
            index = TrajectoryIndex.from_state_dict(index.state_dict())
        before = index.written
        change = index.append(starts)
        naive.append(starts)
        assert change.positions.shape == starts.shape
        assert np.array_equal(
            index.steps(change.positions), np.broadcast_to(before + np.arange(starts.shape[1]), starts.shape)
        )
        check(index, naive, length)


def check(index, naive, length):
    stretches = naive.stretches()
    for minimum in (1, length):
        runs = index.runs_of(minimum)
        members = runs.members[: runs.count]
        got = sorted(zip(*(part.tolist() for part in index.bounds(members)), strict=True))
        assert got == [(lane, first, stop) for lane, first, stop in stretches if stop - first >= minimum]
    assert index.longest() == max((stop - first for _, first, stop in stretches), default=0)
    stored = index.all_positions()
    assert len(index) == stored.size == sum(map(len, naive.lanes))
    assert np.array_equal(index.nth_position(np.arange(stored.size)), stored)
    run_of = {(lane, step): run for lane, steps in enumerate(naive.lanes) for step, run in steps}
    where = [(int(p) // index.capacity, int(s)) for p, s in zip(stored, index.steps(stored), strict=True)]
    assert sorted(where) == sorted(run_of)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(stored.size), 2))
    order = np.concatenate([order, np.arange(stored.size)])
    expected = [False] * bool(order.size)
    for a, b in itertools.pairwise(order):
        (lane, step), (other, later) = where[a], where[b]
        expected.append(lane == other and later == step + 1 and run_of[where[a]] == run_of[where[b]])
    assert index.continues(stored[order]).tolist() == expected
    following, exists = index.successors(stored)
    for place, position, there in zip(where, following, exists, strict=True):
        after = (place[0], place[1] + 1)
        assert there == (after in run_of and run_of[after] == run_of[place])
        assert not there or where[stored.tolist().index(position)] == after


def test_too_much_at_once():
    with pytest.raises(ArgumentError, match="5 steps can't be stored at once, as there is room for 4"):
        TrajectoryIndex(2, 4).append(np.zeros((2, 5), np.bool_))


def test_memory_is_bounded_by_the_stored_steps():
    """Slots of removed runs are reused."""
    index = TrajectoryIndex(1, 50)
    for _ in range(200):
        index.append(np.arange(10)[None] % 3 == 0)
    assert index._first.size <= 128


def test_the_cost_of_an_append_does_not_depend_on_the_stored_steps(monkeypatch):
    """The size of array operations when appending or drawing is bounded by the new steps, not by the stored ones."""
    index = TrajectoryIndex(1, 200_000)
    for _ in range(10):
        index.append((np.arange(20_000) % 20 == 0)[None])
    index.runs_of(5)
    longest = 0
    for name in ("unique", "concatenate"):
        original = getattr(np, name)

        def spy(values, *args, original=original, **kwargs):
            nonlocal longest
            result = original(values, *args, **kwargs)
            first = result[0] if isinstance(result, tuple) else result
            longest = max(longest, first.size)
            return result

        monkeypatch.setattr(np, name, spy)
    for _ in range(100):
        index.append((np.arange(32) % 20 == 0)[None])
    assert 0 < longest <= 64


def test_random_below_is_uniform_and_in_range():
    limits = np.array([1, 3, 10**8])
    draws = np.stack([random_below(limits, 3, None) for _ in range(6000)])
    assert (draws >= 0).all()
    assert (draws < limits).all()
    counts = np.bincount(draws[:, 1], minlength=3)
    assert ((counts - 2000) ** 2 / 2000).sum() < 13.8  # chi-square, 2 degrees of freedom, p = 0.001
    repeat = [random_below(100, 5, torch.Generator().manual_seed(1)).tolist() for _ in range(2)]
    assert repeat[0] == repeat[1]
