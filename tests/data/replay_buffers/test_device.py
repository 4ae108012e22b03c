"""Slices drawn on a device equal those of the host's samplers bitwise, and cover all that a slow reference allows."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, MissingKeyError, UsageError
from recurl.data import LazyTensorStorage, PrioritizedSliceSampler, SliceSampler, TensorDictReplayBuffer
from recurl.data.replay_buffers.device import ByPriority, ByStep, ByTrajectory, DeviceSliceBuffer
from recurl.execution.lowering import leaves
from recurl.execution.readback import refuse_read_back

CAPACITY = 9
DRAWINGS = [
    ByStep,
    ByTrajectory,
    lambda: ByPriority(0.7, 0.5, by_step=True),
    lambda: ByPriority(0.7, 0.5, by_step=False),
]
HOST = [
    lambda length, size: SliceSampler(slice_len=length, strict_length=False, by_step=True),
    lambda length, size: SliceSampler(slice_len=length, strict_length=False),
    *(
        lambda length, size, by_step=by_step: PrioritizedSliceSampler(
            size, 0.7, 0.5, slice_len=length, strict_length=False, by_step=by_step
        )
        for by_step in (True, False)
    ),
]


def batches(rows, ends, lengths):
    """Return batches ``[rows, n]`` for each n of ``lengths``; episodes end after the steps where ``ends`` is true."""
    ends, ids = iter(ends), itertools.count()
    now = [[next(ids), 0] for _ in range(rows)]
    count = 0
    for length in lengths:
        shape = [rows, length]
        numbers = {name: torch.zeros(shape, dtype=torch.int64) for name in ("step", "ids", "steps")}
        init, done = (torch.zeros(*shape, 1, dtype=torch.bool) for _ in range(2))
        for row, step in itertools.product(range(rows), range(length)):
            end = next(ends)
            numbers["step"][row, step], count = count, count + 1
            numbers["ids"][row, step], numbers["steps"][row, step] = now[row]
            init[row, step], done[row, step] = now[row][1] == 0, end
            now[row] = [next(ids), 0] if end else [now[row][0], now[row][1] + 1]
        yield TensorDict(
            {
                "step": numbers["step"],
                "is_init": init,
                "next": {"done": done, "terminated": done, "truncated": torch.zeros_like(done)},
                "collector": {"traj_ids": numbers["ids"], "traj_steps": numbers["steps"]},
            },
            shape,
        )


def allowed(rows, given_batches, length):
    """Return the possible slices as tuples of steps: a reference without a ring."""
    found = set()
    for row in range(rows):
        steps = [
            (int(batch["step"][row, at]), int(batch["collector", "traj_ids"][row, at]))
            for batch in given_batches
            for at in range(batch.shape[1])
        ][-CAPACITY:]
        for _, run in itertools.groupby(steps, key=lambda step: step[1]):
            run = [step for step, _ in run]
            whole = min(length, len(run))
            found |= {tuple(run[at : at + whole]) for at in range(len(run) - whole + 1)}
    return found


def taken(sample):
    """Return the valid steps of a sample ``[S, L]``, flat, and its slices as tuples of steps."""
    mask = sample.get(("collector", "mask"))
    flat = {path: value[mask] for path, value in leaves(sample)}
    return flat, [tuple(step[inside].tolist()) for step, inside in zip(sample["step"], mask, strict=True)]


histories = st.integers(1, 3).flatmap(
    lambda rows: st.tuples(
        st.just(rows),
        st.lists(st.booleans(), min_size=rows * 24, max_size=rows * 24),
        st.lists(st.integers(1, 6), min_size=1, max_size=4),
    )
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(histories, st.integers(1, 4), st.sampled_from(DRAWINGS), st.integers(0, 2**31))
@example((2, [False] * 48, [5]), 3, ByTrajectory, 0)  # not full
@example((2, [False, False, True] * 20, [6, 6, 3]), 3, ByTrajectory, 0)
def test_exactly_the_allowed_slices_are_drawn(history, length, drawing, seed):
    rows, ends, lengths = history
    torch.manual_seed(seed)
    buffer = DeviceSliceBuffer(rows * CAPACITY, 4000, length, drawing())
    given_batches = list(batches(rows, ends, lengths))
    with refuse_read_back():
        for batch in given_batches:
            buffer.extend(batch)
        sample = buffer.sample()
    assert len(buffer) == rows * min(CAPACITY, sum(lengths))
    flat, drawn = taken(sample)
    assert set(drawn) == allowed(rows, given_batches, length)
    every = [dict(leaves(batch)) for batch in given_batches]
    stored = {path: torch.cat([entries[path].flatten(0, 1) for entries in every]) for path in every[0]}
    at = stored["step",].argsort()[flat["step",]]
    for path, value in stored.items():
        assert torch.equal(flat.get(("collector", "stored", *path), flat[path]), value[at]), path
    marks, inside = sample["is_init"].squeeze(-1), sample["collector", "mask"]
    assert marks[:, 0].all()
    assert (marks[:, 1:] == ~inside[:, 1:]).all()  # slices have one trajectory, and padding steps are separate
    ends_at = inside.sum(-1, keepdim=True) - 1 == torch.arange(length)
    assert torch.equal(sample["next", "truncated"].squeeze(-1), ends_at)
    assert torch.equal(sample["next", "done"].squeeze(-1) & inside, ends_at)


@settings(max_examples=30, deadline=None)
@given(histories, st.integers(1, 5), st.integers(0, 3), st.integers(0, 2**31))
@example((2, [False] * 48, [6, 6, 6]), 2 * CAPACITY, 0, 0)  # slices longer than the ring
@example((2, [False] * 48, [6, 6, 6]), 2 * CAPACITY, 3, 0)
def test_equals_the_sampler_on_the_host(history, length, kind, seed):
    rows, ends, lengths = history
    size = rows * CAPACITY
    device, flat_device = (
        DeviceSliceBuffer(size, 6, length, DRAWINGS[kind](), padded=padded) for padded in (True, False)
    )
    host = TensorDictReplayBuffer(
        storage=LazyTensorStorage(size, ndim=2), sampler=HOST[kind](length, size), batch_size=6 * length
    )
    for number, batch in enumerate(batches(rows, ends, lengths)):
        samples = []
        for buffer in (host, device, flat_device):
            buffer.extend(batch)
            torch.manual_seed(seed + number)
            samples.append(buffer.sample())
        expected, sample, flat_sample = samples
        flat, _ = taken(sample)
        flat_entries = dict(leaves(flat_sample))
        for path, value in leaves(expected):
            if path != ("collector", "write_step"):
                assert torch.equal(flat[path], value), path
                assert torch.equal(flat_entries[path], value), path
        if kind > 1:
            priority = torch.rand(6).double() * 3
            device.update_priority(sample, priority, torch.tensor(True))
            of_steps = priority.unsqueeze(-1).expand(6, length)[sample["collector", "mask"]]
            host.update_priority(flat["index",], of_steps)
            flat_device.update_priority(flat_sample, of_steps, torch.tensor(True))
            device.update_priority(sample, torch.full((6,), torch.nan), torch.tensor(False))  # changes nothing


def test_trajectories_and_places_in_them_are_drawn_uniformly():
    torch.manual_seed(0)
    ends = [step in (2, 3, 9) for step in range(12)] * 2
    buffer = DeviceSliceBuffer(24, 60_000, 2, ByTrajectory())
    (batch,) = batches(2, ends, [12])
    buffer.extend(batch)
    _, drawn = taken(buffer.sample())
    # of each row: trajectories of 3, 1, 6 and 2 steps, so 2, 1, 5 and 1 slices of two steps
    chances = {}
    for row in range(2):
        for first, steps in ((0, 3), (3, 1), (4, 6), (10, 2)):
            whole = min(2, steps)
            places = steps - whole + 1
            for place in range(places):
                begin = 12 * row + first + place
                chances[tuple(range(begin, begin + whole))] = 1 / 8 / places
    check_chances(drawn, chances)


@pytest.mark.slow
@pytest.mark.parametrize("by_step", [True, False])
def test_slices_are_drawn_in_proportion_to_priorities(by_step):
    torch.manual_seed(0)
    drawing = ByPriority(1.0, 1.0, by_step=by_step, eps=1e-12)
    buffer = DeviceSliceBuffer(200, 100_000, 1, drawing)  # of more than one level of sums
    (batch,) = batches(2, [False] * 200, [100])
    buffer.extend(batch)
    shares = torch.arange(200.0).double() % 7  # some are never drawn
    drawing.assign(buffer._index, torch.arange(200), shares)
    sample = buffer.sample()
    _, drawn = taken(sample)
    check_chances(drawn, {(step,): share / shares.sum().item() for step, share in enumerate(shares.tolist()) if share})
    weights = drawing.eps / (shares[sample["step"].squeeze(-1)] + drawing.eps)
    torch.testing.assert_close(sample["priority_weight"].squeeze(-1), weights.float())


def check_chances(drawn, chances):
    """Chi-square test at six standard deviations."""
    counts = dict.fromkeys(chances, 0)
    for key in drawn:
        counts[key] += 1
    expected = {key: len(drawn) * chance for key, chance in chances.items()}
    statistic = sum((counts[key] - expected[key]) ** 2 / expected[key] for key in chances)
    freedom = len(chances) - 1
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("drawing", DRAWINGS)
def test_resumes_from_a_saved_state(drawing, padded):
    ends = [step % 5 == 4 for step in range(200)]
    pieces = list(batches(2, ends, [7, 7, 7, 7]))
    whole, restored = (DeviceSliceBuffer(2 * CAPACITY, 8, 3, drawing(), padded=padded) for _ in range(2))
    for batch in pieces[:2]:
        whole.extend(batch)
    if isinstance(whole.drawing, ByPriority):
        sample = whole.sample()
        priority = torch.arange(8.0) if padded else torch.arange(float(len(sample)))
        whole.update_priority(sample, priority, torch.tensor(True))
    restored.load_state_dict(whole.state_dict())
    if isinstance(whole.drawing, ByPriority):
        assert restored.drawing.length == whole.drawing.length
        assert torch.equal(restored.drawing.tree.inner_sums(), whole.drawing.tree.inner_sums())
    again = DeviceSliceBuffer(2 * CAPACITY, 8, 3, drawing(), padded=padded)
    again.extend(pieces[3])
    again.load_state_dict(whole.state_dict())  # in memory that a graph may have captured
    samples = []
    for buffer in (whole, restored, again):
        buffer.extend(pieces[2])
        torch.manual_seed(0)
        samples.append(dict(leaves(buffer.sample())))
    for other in samples[1:]:
        assert all(torch.equal(value, other[path]) for path, value in samples[0].items())


def test_an_empty_buffer_is_saved_and_restored():
    buffer = DeviceSliceBuffer(8, 2, 2, ByStep())
    buffer.load_state_dict(DeviceSliceBuffer(8, 2, 2, ByStep()).state_dict())
    assert len(buffer) == 0
    with pytest.raises(UsageError, match="The buffer is empty"):
        buffer.sample()


def test_invalid_batches():
    (batch,) = batches(2, [False] * 20, [10])
    buffer = DeviceSliceBuffer(10, 2, 2, ByStep())
    with pytest.raises(ArgumentError, match="10 steps can't be stored at once, as there is room for 5 per row"):
        buffer.extend(batch)
    with pytest.raises(MissingKeyError, match=r"A batch must have the entry \('collector', 'traj_ids'\)"):
        buffer.extend(batch.exclude(("collector", "traj_ids")))
    with pytest.raises(ArgumentError, match=r"A batch must be \[B, T\], on cpu, got \[20\] on cpu"):
        buffer.extend(batch.reshape(-1))
    host = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20, ndim=2), sampler=SliceSampler(slice_len=2), batch_size=4
    )
    host.extend(batch)
    with pytest.raises(ArgumentError, match="A sample of a buffer can't be stored on the device"):
        buffer.extend(host.sample().unsqueeze(0))
    with pytest.raises(ArgumentError, match="slices and slice_length must be positive, got 0 and 2"):
        DeviceSliceBuffer(10, 0, 2, ByStep())


def test_saved_buffers_of_another_kind():
    (batch,) = batches(2, [False] * 20, [5])
    buffer = DeviceSliceBuffer(20, 2, 2, ByStep())
    buffer.extend(batch)
    with pytest.raises(ArgumentError, match=r"saved buffer must have .*'ndim': 2}, but has .*'ndim': 1"):
        buffer.load_state_dict(TensorDictReplayBuffer(storage=LazyTensorStorage(20)).state_dict())
    with pytest.raises(ArgumentError, match=r"saved buffer must have .*'max_size': 18.*, but has .*'max_size': 20"):
        DeviceSliceBuffer(18, 2, 2, ByStep()).load_state_dict(buffer.state_dict())
    with pytest.raises(ArgumentError, match="The saved buffer must have priorities"):
        DeviceSliceBuffer(20, 2, 2, ByPriority(1.0, 1.0, by_step=True)).load_state_dict(buffer.state_dict())
    with pytest.raises(ArgumentError, match="The saved buffer can't be read"):
        buffer.load_state_dict({**buffer.state_dict(), "keys": None})


def test_priorities_need_a_buffer_that_draws_by_them():
    (batch,) = batches(1, [False] * 10, [10])
    buffer = DeviceSliceBuffer(10, 2, 2, ByStep())
    buffer.extend(batch)
    with pytest.raises(UsageError, match="ByStep draws without priorities: use ByPriority"):
        buffer.update_priority(buffer.sample(), torch.ones(2), torch.tensor(True))


@pytest.mark.parametrize("padded", [True, False])
def test_images_are_stored_once_unless_samples_are_padded(padded):
    buffer = DeviceSliceBuffer(20, 8, 4, ByStep(), padded=padded)
    for batch in batches(2, [step == 4 for step in range(60)], [7, 7, 7]):
        images = batch["step"].to(torch.uint8).reshape(2, 7, 1, 1).expand(2, 7, 3, 3).contiguous()
        batch["image"], batch["next", "image"] = images, images + 1
        buffer.extend(batch)
        sample = buffer.sample()
        flat = taken(sample)[0] if padded else dict(leaves(sample))
        assert torch.equal(flat["image",][:, 0, 0] + 1, flat["next", "image"][:, 0, 0])
        assert (("next", "image") in buffer.storage._leaves) == padded
    other = DeviceSliceBuffer(20, 8, 4, ByStep(), padded=not padded)
    other.load_state_dict(buffer.state_dict())
    assert (other[:] == buffer[:]).all()
