from __future__ import annotations

from bisect import bisect
from itertools import accumulate, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UsageError
from recurl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from recurl.data.replay_buffers.samplers import (
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from tests.data.replay_buffers.slices import buffer_of, counted, drawn_slices, steps


def check_uniform(counts, possible):
    """Chi-square test against the uniform distribution over ``possible`` outcomes, at about 4.5 standard deviations."""
    counts = np.array([counts.get(outcome, 0) for outcome in possible])
    expected = counts.sum() / len(counts)
    assert expected > 5
    freedom = len(counts) - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 4.5 * (2 * freedom) ** 0.5 + 5


@pytest.mark.parametrize("max_size", [100, 64])
def test_random_steps_are_uniform(max_size):
    buffer = buffer_of(RandomSampler(), [30, 20], 50, max_size)
    buffer.extend(steps([30]))
    sample = buffer.sample(20_000)
    check_uniform(counted(sample["index"].tolist()), range(min(80, max_size)))


def test_trajectories_and_starts_are_uniform():
    """A trajectory, regardless of its length, then a start within it; too short trajectories are never drawn."""
    lengths, length = [4, 3, 10, 6], 4
    buffer = buffer_of(SliceSampler(slice_len=length), lengths, 4 * 6000)
    begins = [piece[0] for piece in drawn_slices(buffer.sample())]
    assert len(begins) == 6000
    of_trajectory = {0: range(1), 2: range(7, 14), 3: range(17, 20)}
    number = {start: name for name, starts in of_trajectory.items() for start in starts}
    check_uniform(counted(number[begin] for begin in begins), of_trajectory)
    for starts in of_trajectory.values():
        if len(starts) > 1:
            check_uniform(counted(begin for begin in begins if begin in starts), starts)


@pytest.mark.parametrize("strict", [True, False])
def test_trajectories_in_proportion_to_their_length(strict):
    lengths = [4, 3, 10, 6]
    buffer = buffer_of(SliceSampler(slice_len=4, strict_length=strict, by_step=True), lengths, 4 * 6000)
    ends = list(accumulate(lengths))
    drawn = counted(bisect(ends, piece[0]) for piece in drawn_slices(buffer.sample()))
    assert set(drawn) == ({0, 2, 3} if strict else {0, 1, 2, 3})
    # By step: each drawn as often as the others, so that counts per step of a trajectory are alike.
    expected = sum(drawn.values()) / sum(lengths[name] for name in drawn)
    for name, count in drawn.items():
        assert abs(count / lengths[name] - expected) < 4.5 * (expected / lengths[name]) ** 0.5


BY_STEP = {
    "uniform": lambda: SliceSampler(slice_len=4, strict_length=False, by_step=True),
    "priorities": lambda: PrioritizedSliceSampler(1000, 1.0, 1.0, slice_len=4, strict_length=False, by_step=True),
}


@pytest.mark.parametrize("make", BY_STEP.values(), ids=BY_STEP)
def test_slices_around_steps(make):
    """A step, then its place in the slice: the ends of episodes are also frequent, in slices of full length."""
    lengths, length, count = [30, 3, 11], 4, 12_000
    buffer = buffer_of(make(), lengths, length * count)
    outcomes, first = {}, 0
    for trajectory in lengths:
        size = min(trajectory, length)
        for step, place in product(range(trajectory), range(size)):
            begin = first + min(max(step - place, 0), trajectory - size)
            outcomes[begin, size] = outcomes.get((begin, size), 0) + count / sum(lengths) / size
        first += trajectory
    pieces = drawn_slices(buffer.sample())
    drawn = counted((piece[0], len(piece)) for piece in pieces)
    assert set(drawn) == set(outcomes)
    assert (
        sum((drawn[key] - n) ** 2 / n for key, n in outcomes.items()) < len(outcomes) + 4.5 * (2 * len(outcomes)) ** 0.5
    )
    of_steps = counted(step for piece in pieces for step in piece)
    assert min(of_steps.values()) > 0.5 * count * length / sum(lengths)


def test_a_step_of_high_priority_is_drawn():
    """At any place in its trajectory, including the last step."""
    sampler = PrioritizedSliceSampler(1000, 1.0, 1.0, slice_len=4, strict_length=False, by_step=True)
    buffer = buffer_of(sampler, [9, 6], 4 * 50)
    buffer.update_priority(torch.arange(15), torch.arange(15) == 8)
    pieces = drawn_slices(buffer.sample())
    assert {tuple(piece) for piece in pieces} == {(5, 6, 7, 8)}


def test_short_trajectories_come_whole():
    buffer = buffer_of(SliceSampler(num_slices=3000, strict_length=False), [2, 9], 3000 * 5)
    sample = buffer.sample()
    pieces = drawn_slices(sample)
    assert len(sample) == sum(map(len, pieces)) < 15_000
    check_uniform(counted(len(piece) for piece in pieces), [2, 5])
    assert all(piece == [0, 1] for piece in pieces if len(piece) == 2)


@pytest.mark.parametrize(
    ("span", "outcomes"),
    [
        (True, [(0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (3, 5), (4, 5)]),
        ((False, 1), [(0, 3), (1, 4), (2, 5), (3, 5)]),
        ((2, False), [(0, 1), (0, 2), (0, 3), (1, 4), (2, 5)]),
        (1, [(0, 2), (0, 3), (1, 4), (2, 5), (3, 5)]),
    ],
)
def test_span_overlaps_beginning_and_end(span, outcomes):
    buffer = buffer_of(SliceSampler(slice_len=3, span=span), [5], 3 * 5000)
    check_uniform(counted((piece[0], piece[-1] + 1) for piece in drawn_slices(buffer.sample())), outcomes)


@pytest.mark.parametrize("strict", [True, False])
def test_padding_and_mask_are_always_written(strict):
    lengths = [2, 5] if not strict else [5, 5]
    sampler = SliceSampler(slice_len=4, strict_length=False, pad_output=True)
    sample = buffer_of(sampler, lengths, 4 * 50).sample()
    mask, index = sample["collector", "mask"].reshape(50, 4), sample["index"].reshape(50, 4)
    assert mask.dtype == torch.bool
    assert sample.shape == (200,)
    assert mask[:, 0].all()
    assert mask.all() == strict
    short = ~mask[:, 2]
    assert (index[short] == torch.tensor([0, 1, 1, 1])).all()
    assert torch.equal(mask[short], torch.tensor([True, True, False, False]).expand_as(mask[short]))
    assert sample["is_init"].reshape(50, 4)[~mask].all()
    ends = sample["next", "truncated"].reshape(50, 4)
    assert torch.equal(ends, mask & ~torch.cat([mask[:, 1:], torch.zeros(50, 1, dtype=torch.bool)], 1))


def test_marks_at_the_ends_of_slices():
    buffer = buffer_of(SliceSampler(slice_len=3), [7, 7], 30)
    before = buffer[:].clone()
    sample = buffer.sample()
    last = torch.arange(30) % 3 == 2
    stored = buffer[sample["index"]]
    for name, key in (("truncated", last), ("done", last | stored["next", "done"].squeeze(-1))):
        assert torch.equal(sample["next", name].squeeze(-1), key)
        assert torch.equal(sample["collector", "stored", "next", name], stored["next", name])
    assert torch.equal(sample["next", "terminated"], stored["next", "terminated"])
    assert torch.equal(sample["is_init"].squeeze(-1), torch.arange(30) % 3 == 0)
    assert torch.equal(sample["collector", "stored", "is_init"], stored["is_init"])
    for value in sample.values(True, True):
        value.zero_()
    assert (buffer[:] == before).all(), "sampling must not change the stored data"


def test_done_flags_are_left_alone_on_request():
    buffer = buffer_of(SliceSampler(slice_len=3, truncated_key=None), [7, 7], 30)
    sample = buffer.sample()
    assert not sample["next", "truncated"].any()
    assert torch.equal(sample["next", "done"], buffer[sample["index"]]["next", "done"])


def test_marks_without_flags_in_the_data():
    """Data without is_init and truncated gets both, and is_init defines the segments."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=3, end_key="end"), batch_size=6
    )
    buffer.extend(TensorDict({"end": torch.arange(20) % 5 == 4}, [20]))
    sample = buffer.sample()
    assert sample["is_init"].tolist() == [[True], [False], [False]] * 2
    assert sample["next", "truncated"].tolist() == [[False], [False], [True]] * 2


@st.composite
def recordings(draw):
    """Lanes, capacity, and batches [lanes, n] of trajectory numbers with random switches."""
    lanes, capacity = draw(st.integers(1, 3)), draw(st.integers(2, 20))
    density = draw(st.sampled_from([0.05, 0.2, 0.6]))
    counts = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    return lanes, capacity, [random.random((lanes, count)) < density for count in counts]


@settings(deadline=None, max_examples=120)
@given(
    recordings(),
    st.integers(1, 5),
    st.sampled_from(
        [
            "strict",
            "ragged",
            "padded",
            "by step",
            "by step ragged",
            "span",
            "once",
            "priority",
            "priority ragged",
            "priority by step ragged",
        ]
    ),
)
def test_no_slice_crosses_a_trajectory_or_the_write_cursor(recording, length, kind):
    lanes, capacity, batches = recording
    size = lanes * capacity
    sampler = {
        "strict": lambda: SliceSampler(slice_len=length),
        "ragged": lambda: SliceSampler(slice_len=length, strict_length=False),
        "padded": lambda: SliceSampler(slice_len=length, strict_length=False, pad_output=True),
        "by step": lambda: SliceSampler(slice_len=length, by_step=True),
        "by step ragged": lambda: SliceSampler(slice_len=length, strict_length=False, by_step=True),
        "span": lambda: SliceSampler(slice_len=length, span=(1, True)),
        "once": lambda: SliceSampler(slice_len=length, replacement=False),
        "priority": lambda: PrioritizedSliceSampler(size, 1.0, 1.0, slice_len=length),
        "priority ragged": lambda: PrioritizedSliceSampler(size, 1.0, 1.0, slice_len=length, strict_length=False),
        "priority by step ragged": lambda: PrioritizedSliceSampler(
            size, 1.0, 1.0, slice_len=length, strict_length=False, by_step=True
        ),
    }[kind]()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(size, ndim=2), sampler=sampler, batch_size=8 * length)
    time, ids = 0, torch.arange(lanes)
    for switches in batches:
        count = switches.shape[1]
        traj_ids = ids[:, None] + lanes * torch.from_numpy(switches).cumsum(1)
        ids = traj_ids[:, -1]
        batch = TensorDict(
            {"collector": {"traj_ids": traj_ids}, "time": (time + torch.arange(count)).expand(lanes, count)},
            [lanes, count],
        )
        time += count
        buffer.extend(batch)
        try:
            sample = buffer.sample()
        except UsageError as error:
            assert "No stored trajectory has" in str(error)  # noqa: PT017 - whether it raises depends on the data
            assert "ragged" not in kind
            continue
        mask = sample.get(("collector", "mask"), torch.ones(len(sample), dtype=torch.bool))
        inside = ~sample["is_init"].squeeze(-1)
        moment, ids_drawn = sample["time"], sample["collector", "traj_ids"]
        assert (moment[1:][inside[1:]] == moment[:-1][inside[1:]] + 1).all()
        assert (ids_drawn[1:][inside[1:]] == ids_drawn[:-1][inside[1:]]).all()
        assert (moment[mask] > time - 1 - capacity).all(), "a step that was overwritten"
        lengths = [len(piece) for piece in drawn_slices(sample)]
        assert max(lengths) <= length
        if kind in ("strict", "once", "priority", "by step"):
            assert set(lengths) == {length}
        if kind != "once":
            assert len(lengths) == 8


def test_each_step_once_per_epoch():
    buffer = buffer_of(SamplerWithoutReplacement(), [30, 20], 8)
    for _ in range(2):
        epoch = [sample["index"] for sample in buffer]
        assert [len(part) for part in epoch] == [8] * 6 + [2]
        assert sorted(torch.cat(epoch).tolist()) == list(range(50))
    buffer.sample()
    buffer.extend(steps([10]))
    assert sorted(torch.cat([sample["index"] for sample in buffer]).tolist()) == list(range(60))
    next(iter(buffer))
    assert sum(len(sample) for sample in buffer) == 60, "each iteration begins a new epoch"
    assert [len(buffer.sample()) for _ in range(9)] == [8] * 7 + [4] + [8]


def test_drop_last_and_order():
    buffer = buffer_of(SamplerWithoutReplacement(drop_last=True, shuffle=False), [11], 4)
    assert [sample["index"].tolist() for sample in buffer] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [len(buffer.sample()) for _ in range(5)] == [4] * 5
    with pytest.raises(UsageError, match="A batch needs 12 stored steps with drop_last=True, but there are only 11"):
        buffer.sample(12)


def test_steps_in_order_stay_one_segment():
    buffer = buffer_of(SamplerWithoutReplacement(shuffle=False), [6, 6], 12)
    assert buffer.sample()["is_init"].squeeze(-1).nonzero().squeeze(-1).tolist() == [0, 6]


def test_each_trajectory_once_per_epoch():
    buffer = buffer_of(SliceSampler(slice_len=4, replacement=False), [5, 3, 8, 4, 9, 9], 12)
    for _ in range(3):
        epoch = list(buffer)
        assert [len(sample) for sample in epoch] == [12, 8]
        assert sorted(torch.cat(epoch)["episode"][::4].tolist()) == [0, 2, 3, 4, 5]
    assert [len(buffer.sample()) for _ in range(3)] == [12, 8, 12]


def test_a_buffer_resumes_where_it_was_saved():
    def make():
        sampler = PrioritizedSliceSampler(64, 0.7, 0.5, slice_len=4)
        generator = torch.Generator().manual_seed(3)
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(64), sampler=sampler, batch_size=32, generator=generator
        )

    buffer, other = make(), make()
    for _ in range(5):
        buffer.extend(steps([5, 9, 7]))
        sample = buffer.sample()
        buffer.update_priority(sample["index"], torch.rand(32))
    other.load_state_dict(buffer.state_dict())
    for _ in range(3):
        assert (buffer.sample() == other.sample()).all()
        for each in (buffer, other):
            each.extend(steps([5, 9, 7]))


@pytest.mark.parametrize("make", [SamplerWithoutReplacement, lambda: SliceSampler(slice_len=4, replacement=False)])
def test_an_epoch_resumes_where_it_was_saved(make):
    buffer = buffer_of(make(), [9] * 8, 12)
    buffer.sample()
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=make(), batch_size=12)
    other.load_state_dict(buffer.state_dict())
    assert torch.equal(buffer.sample()["episode"], other.sample()["episode"])


@pytest.mark.parametrize("kind", [SliceSampler, lambda **options: PrioritizedSliceSampler(1000, 1.0, 1.0, **options)])
def test_errors_of_slices(kind):
    for options in ({}, {"num_slices": 2, "slice_len": 3}):
        with pytest.raises(ArgumentTypeError, match="exactly one of num_slices and slice_len"):
            kind(**options)
    with pytest.raises(ArgumentError, match="must be positive, got 0"):
        kind(slice_len=0)
    with pytest.raises(ArgumentError, match="Give traj_key or end_key, not both"):
        kind(slice_len=2, traj_key="a", end_key="b")
    with pytest.raises(UsageError, match="multiple of slice_len=4, got 10"):
        buffer_of(kind(slice_len=4), [20], 10).sample()
    with pytest.raises(UsageError, match="multiple of num_slices=4, got 10"):
        buffer_of(kind(num_slices=4), [20], 10).sample()
    with pytest.raises(UsageError, match="No stored trajectory has 8 steps, the longest has 5"):
        buffer_of(kind(slice_len=8), [5, 3], 16).sample()
    with pytest.raises(MissingKeyError, match=r"must have the entry 'nowhere'.*'episode'"):
        buffer_of(kind(slice_len=4, end_key="nowhere"), [20], 8)
    with pytest.raises(MissingKeyError, match="must have the entry 'nowhere'"):
        buffer_of(kind(slice_len=4, traj_key="nowhere"), [20], 8)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=kind(slice_len=2), batch_size=4)
    buffer.extend(TensorDict({"observation": torch.zeros(8)}, [8]))
    with pytest.raises(MissingKeyError, match="Name another with traj_key= or end_key="):
        buffer.sample()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=kind(slice_len=2), batch_size=4)
    buffer.extend(steps([6]).reshape(2, 3))
    with pytest.raises(MissingKeyError, match="or use ndim=2"):
        buffer.sample()
    data = steps([6])
    data["wide"] = torch.zeros(6, 2)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=kind(slice_len=2, traj_key="wide"))
    with pytest.raises(ArgumentError, match="'wide' must have one value per step, 6 in all"):
        buffer.extend(data)


def test_errors_of_slice_options():
    with pytest.raises(ArgumentError, match="pad_output=True needs strict_length=False"):
        SliceSampler(slice_len=3, pad_output=True)
    with pytest.raises(ArgumentError, match="by_step=True needs replacement=True"):
        SliceSampler(slice_len=3, by_step=True, replacement=False)
    with pytest.raises(ArgumentError, match="by_step=True keeps slices within their trajectories: omit span"):
        SliceSampler(slice_len=3, by_step=True, span=1)
    with pytest.raises(ArgumentError, match="by_step=True needs strict_length=False"):
        PrioritizedSliceSampler(9, 1.0, 1.0, slice_len=3, by_step=True)
    with pytest.raises(ArgumentError, match="span must be"):
        SliceSampler(slice_len=3, span=(1, -1))


def test_plain_tensors():
    """For data without entries to mark, starts and index are in the info."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=5)
    buffer.extend(torch.arange(8.0))
    sample, info = buffer.sample(return_info=True)
    assert torch.equal(sample, info["index"].float())
    assert info["starts"].all()
