"""Features recomputed on any sample equal the collected ones, and depend on the memory."""

from __future__ import annotations

import pytest
import torch

from recurl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from recurl.modules import set_recurrent_mode
from tests.data.replay_buffers.collected import KNOWN, check_features, make_collector, make_policy, recomputed, segments

SAMPLERS = {
    "random": RandomSampler,
    "shuffled": SamplerWithoutReplacement,
    "in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "prioritized": lambda: PrioritizedSampler(1000, 0.7, 0.5),
    "strict": lambda: SliceSampler(slice_len=8),
    "strict by number": lambda: SliceSampler(num_slices=4),
    "ragged": lambda: SliceSampler(slice_len=16, strict_length=False),
    "padded": lambda: SliceSampler(slice_len=16, strict_length=False, pad_output=True),
    "span": lambda: SliceSampler(slice_len=8, span=(True, 3)),
    "padded span": lambda: SliceSampler(slice_len=16, strict_length=False, pad_output=True, span=True),
    "without replacement": lambda: SliceSampler(slice_len=8, replacement=False),
    "by end key": lambda: SliceSampler(slice_len=8, end_key=("next", "done")),
    "prioritized slices": lambda: PrioritizedSliceSampler(1000, 0.7, 0.5, slice_len=8),
    "prioritized ragged": lambda: PrioritizedSliceSampler(1000, 0.7, 0.5, slice_len=16, strict_length=False),
}


@pytest.fixture(scope="module")
def data():
    """Policies with six batches each from one environment and from three."""
    torch.manual_seed(0)
    result = {}
    for cell, rows in (("lstm", None), ("gru", 3)):
        policy = make_policy(cell)
        collector = make_collector(policy, rows, frames=96)
        result[rows] = policy, [collector.collect() for _ in range(6)]
        collector.shutdown()
    return result


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_features_on_every_sample(data, name, kind):
    """Before the ring is full, and after it has been overwritten twice."""
    policy, batches = data[None]
    buffer = kind(storage=LazyTensorStorage(250), sampler=SAMPLERS[name](), batch_size=32)
    for batch in batches:
        buffer.extend(batch)
        check_features(policy, buffer.sample())


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_features_from_rows(data, name):
    """Rows that continue across batches, and concatenated rows; in memory, on disk, as a list."""
    policy, batches = data[3]
    for storage in (
        LazyTensorStorage(200, ndim=2),
        LazyMemmapStorage(200, ndim=2),
        LazyMemmapStorage(250),
        ListStorage(250),
    ):
        buffer = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[name](), batch_size=32)
        for batch in batches:
            buffer.extend(batch if storage.ndim == 2 else batch.reshape(-1))
            check_features(policy, buffer.sample())


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_features_after_reload(data, name, storage, tmp_path):
    policy, batches = data[None]

    def make():
        return TensorDictReplayBuffer(storage=storage(250), sampler=SAMPLERS[name](), batch_size=32)

    buffer, loaded, restored = make(), make(), make()
    for batch in batches[:4]:
        buffer.extend(batch)
    buffer.dumps(tmp_path / "saved")
    loaded.loads(tmp_path / "saved")
    restored.load_state_dict(buffer.state_dict())
    for other in (loaded, restored):
        other.extend(batches[4])  # continues the last trajectory
        check_features(policy, other.sample())


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("cell", KNOWN)
def test_features_of_every_cell(cell, rows, tmp_path):
    """On samples of every sampler, in memory and on disk, with states of any shape."""
    torch.manual_seed(0)
    policy = make_policy(cell)
    collector = make_collector(policy, rows, frames=96)
    batches = [collector.collect() for _ in range(3)]
    collector.shutdown()
    for name, make in SAMPLERS.items():
        storage = LazyMemmapStorage if name in ("strict", "ragged", "random") else LazyTensorStorage
        buffer = TensorDictReplayBuffer(
            storage=storage(250, ndim=1 + (rows is not None)), sampler=make(), batch_size=32
        )
        for batch in batches:
            buffer.extend(batch)
            check_features(policy, buffer.sample())


@pytest.mark.parametrize("name", ["strict", "prioritized slices", "padded", "ragged"])
def test_memory_is_real(data, name):
    """A slice is one segment of full length: gradients flow from its last feature to its first step."""
    policy, batches = data[None]
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=SAMPLERS[name](), batch_size=32)
    for batch in batches:
        buffer.extend(batch)
    sample = buffer.sample()
    mask = sample.get(("collector", "mask"), torch.ones(sample.shape, dtype=torch.bool))
    lengths = [length for length in segments(sample) if length > 1]
    if name in ("strict", "prioritized slices"):
        assert lengths == [8] * 4
    assert sum(lengths) == int(mask.sum())
    starts = sample["is_init"].squeeze(-1) & mask
    last = torch.cat([starts[1:] | ~mask[1:], torch.tensor([True])]) & mask
    altered = sample.clone()
    altered["observation"][starts] += 1.0
    assert (recomputed(policy, altered)[last] != sample["features"][last]).all()
    sample["observation"].requires_grad_()
    with set_recurrent_mode(True):
        policy[0](sample)["features"][last].sum().backward()
    assert (sample["observation"].grad[starts].abs().sum(-1) > 0).all()


def test_adjacent_slices_stay_separate(data):
    """Two slices that happen to be adjacent in the storage are still two segments."""
    _, batches = data[None]
    length = 4
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000), sampler=SliceSampler(slice_len=length), batch_size=length * 200
    )
    buffer.extend(batches[0][:12])
    sample = buffer.sample()
    index = sample["index"].reshape(-1, length)
    assert (index[1:, 0] == index[:-1, -1] + 1).any()
    assert segments(sample) == [length] * 200


def test_a_sample_of_a_sample(data):
    """Extending a buffer with samples adds no episode starts, and no slice spans two samples."""
    policy, batches = data[None]
    first = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000),
        sampler=SliceSampler(slice_len=12, strict_length=False, pad_output=True),
        batch_size=48,
    )
    first.extend(torch.cat(batches))
    second = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=SliceSampler(slice_len=6), batch_size=24)
    for _ in range(5):
        sample = first.sample()
        real = sample[sample["collector", "mask"]]
        index = second.extend(sample)
        assert len(index) == len(real)
        stored = second[index]
        assert set(stored.keys(True, True)) == set(batches[0].keys(True, True))
        for key in ("is_init", ("next", "done"), ("next", "truncated"), "observation"):
            assert torch.equal(stored[key], first[real["index"]][key]), key
        second.extend(batches[0][:3])  # of some trajectory that the sample may have ended with
        check_features(policy, second.sample())
    first.extend(sample)  # into the buffer that it came from
    check_features(policy, first.sample())
