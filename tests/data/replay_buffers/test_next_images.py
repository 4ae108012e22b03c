"""Deduplicated next images are read back exactly, whatever is written, sampled or saved."""

import pytest
import torch
from tensordict import TensorDict

from recurl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from recurl.data.replay_buffers.next_images import NextImages

CAPACITY, ROWS, STEPS = 40, 3, 7
SIZE = CAPACITY * ROWS
SAMPLERS = {
    "random": RandomSampler,
    "without": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(SIZE, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=5, strict_length=False),
    "prioritized-slices": lambda: PrioritizedSliceSampler(SIZE, 0.7, 0.5, slice_len=5, strict_length=False),
}


class Stream:
    """Batches ``[rows, steps]`` of episodes of random lengths; float entries determine the expected images."""

    def __init__(self, rows=ROWS, ends=0.2):
        self.generator = torch.Generator().manual_seed(0)
        self.rows, self.ends = rows, ends
        self.image = self.images()
        self.traj, self.time = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)

    def images(self):
        return torch.randint(0, 256, (self.rows, 4, 3), dtype=torch.uint8, generator=self.generator)

    def step(self):
        root, after = self.image, self.images()
        done = torch.rand(self.rows, 1, generator=self.generator) < self.ends
        ids = {"traj_ids": self.traj.clone(), "traj_steps": self.time.clone()}
        self.image = torch.where(done.unsqueeze(-1), self.images(), after)
        self.traj = torch.where(done.squeeze(-1), self.traj + self.rows, self.traj)
        self.time = torch.where(done.squeeze(-1), 0, self.time + 1)
        ended = {"done": done, "truncated": done, "terminated": torch.zeros_like(done)}
        after = {"image": after, "float": after.float(), **ended}
        td = {"image": root, "float": root.float(), "next": after, "collector": ids}
        return TensorDict(td, [self.rows])

    def batch(self, steps=STEPS):
        return torch.stack([self.step() for _ in range(steps)], 1)


def check(data):
    for part in (data, data["next"]):
        assert part["image"].dtype == torch.uint8
        assert torch.equal(part["image"].float(), part["float"])


def make(storage=LazyTensorStorage, sampler=RandomSampler, ndim=2):
    generator = torch.Generator().manual_seed(1)
    return TensorDictReplayBuffer(
        storage=storage(SIZE, ndim=ndim), sampler=sampler(), batch_size=20, generator=generator
    )


def images_of(buffer):
    return buffer.storage._next["next", "image"]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_every_sampler_reads_true_images_before_and_after_the_ring_is_full(sampler, storage):
    buffer, stream = make(storage, sampler), Stream()
    for _ in range(3 * CAPACITY // STEPS):
        buffer.extend(stream.batch())
        check(buffer[:])
        check(buffer.sample())
    ends = buffer[:]["next", "done"].sum().item()
    assert ends <= images_of(buffer).stored <= ends + ROWS  # the newest of each lane, until the next step is added


@pytest.mark.parametrize("steps", [1, CAPACITY - 1, CAPACITY])
def test_batches_of_every_length(steps):
    buffer, stream = make(), Stream()
    for _ in range(5):
        buffer.extend(stream.batch(steps))
        check(buffer[:])


def test_one_lane_of_several_rows_one_after_another():
    buffer, stream = make(ndim=1), Stream()
    for _ in range(12):
        buffer.extend(stream.batch().reshape(-1))
        check(buffer[:])


def test_steps_that_dont_follow_each_other():
    buffer, stream = make(ndim=1), Stream(ends=0.0)
    for _ in range(9):
        batch = stream.batch().reshape(-1)
        buffer.extend(batch[torch.randperm(batch.numel())])
        check(buffer[:])
    buffer.extend(buffer.sample(5))
    check(buffer[:])


@pytest.mark.parametrize("filled", [5, 3 * CAPACITY // STEPS])
@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_saved_and_restored(tmp_path, storage, how, filled):
    buffer, stream, again = make(storage), Stream(), make(storage)
    for _ in range(filled):
        buffer.extend(stream.batch())
    again.extend(Stream().batch())  # existing data is replaced
    if how == "dumps":
        buffer.dumps(tmp_path / "saved")
        again.loads(tmp_path / "saved")
        check(TensorDict.load_memmap(tmp_path / "saved" / "storage"))
    else:
        state = buffer.state_dict()
        assert ("next", "image") not in state["storage"]["entries"]
        again.load_state_dict(state)
    batches = [stream.batch() for _ in range(8)]
    for part in (buffer, again):
        for batch in batches:
            part.extend(batch)
            check(part[:])
            check(part.sample())
    assert (buffer[:] == again[:]).all()
    assert images_of(buffer).stored == images_of(again).stored


def test_states_saved_whole_by_earlier_versions_are_read():
    buffer, stream, again = make(), Stream(), make()
    for _ in range(9):
        buffer.extend(stream.batch())
    state = buffer.state_dict()
    positions = buffer.storage._positions(CAPACITY)
    state["storage"]["entries"]["next", "image"] = images_of(buffer).get(positions)
    del state["storage"]["next"]
    again.load_state_dict(state)
    check(again[:])
    assert (buffer[:] == again[:]).all()
    assert images_of(again).stored <= images_of(buffer).stored + ROWS


def test_single_entries_can_be_overwritten():
    buffer, stream = make(), Stream()
    for _ in range(9):
        buffer.extend(stream.batch())
    kept = buffer[:].clone()
    index = torch.tensor([0, 3, 4, CAPACITY - 1, CAPACITY, 50])
    root, after = (torch.randint(0, 256, (6, 4, 3), dtype=torch.uint8) for _ in range(2))
    for entries in ({"image": root}, {("next", "image"): after}):
        buffer.storage.write(index, entries)
        for key, value in entries.items():
            kept[key][index] = value
        assert (buffer[:] == kept).all()


def test_other_entries_are_stored_as_before():
    buffer = make(ndim=1)
    vector = torch.randint(0, 255, (6, 9), dtype=torch.uint8)
    items = {"x": vector, "y": torch.zeros(6, 4, 4), "z": torch.zeros(6, 4, 4, dtype=torch.uint8)}
    after = {"x": vector, "y": items["y"], "z": torch.zeros(6, 4, 5, dtype=torch.uint8), "w": items["z"]}
    buffer.extend(TensorDict({**items, "next": after}, [6]))
    assert buffer.storage._next == {}


def test_whatever_is_written_wherever_is_read_back():
    """A ring of two lanes against a table, with arbitrary positions and few different images."""
    generator = torch.Generator().manual_seed(0)
    root, table = torch.zeros(2, 14, 2, 1, dtype=torch.uint8)
    images = NextImages(root, 2, torch.zeros(1, 2, 1, dtype=torch.uint8))
    written = torch.zeros(14, dtype=torch.bool)
    for turn in range(400):
        index = torch.randperm(14, generator=generator)[: 1 + turn % 9]
        index = index.sort().values if turn % 2 else index
        new, after = torch.randint(0, 3, (2, index.numel(), 2, 1), dtype=torch.uint8, generator=generator)
        if turn % 5 == 4:
            images.write_root(index, new)
        elif turn % 5 == 3:
            images.write(index, after)
        else:
            images.set(index, new, after)
        if turn % 5 != 3:
            root[index] = new
        if turn % 5 != 4:
            table[index] = after
            written[index] = True
        known = written.nonzero().squeeze(-1)
        assert torch.equal(images.get(known), table[known])
        assert images.stored <= known.numel()
