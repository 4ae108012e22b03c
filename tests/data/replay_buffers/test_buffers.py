from __future__ import annotations

import threading

import pytest
import torch
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UsageError
from recurl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.data.replay_buffers.test_samplers import steps


def make(max_size=100, **options):
    return TensorDictReplayBuffer(**({"storage": LazyTensorStorage(max_size), "batch_size": 8} | options))


def test_batch_size():
    buffer = make()
    buffer.extend(steps([20]))
    assert len(buffer.sample()) == 8
    assert len(buffer.sample(5)) == 5
    endless = iter(buffer)
    assert [len(next(endless)) for _ in range(20)] == [8] * 20
    with pytest.raises(UsageError, match="A batch size is needed"):
        make(batch_size=None).sample()
    with pytest.raises(UsageError, match="The buffer is empty: extend it first"):
        make().sample()
    for options in ({"batch_size": 0}, {"prefetch": -1}):
        with pytest.raises(ArgumentError, match="batch_size must be positive and prefetch not negative"):
            make(**options)


def test_write_count_keeps_growing_when_old_steps_are_overwritten():
    buffer = make(max_size=30)
    assert buffer.write_count == 0
    for _ in range(3):
        buffer.extend(steps([20]))
    assert (buffer.write_count, len(buffer)) == (60, 30)
    rows = make(max_size=30, storage=LazyTensorStorage(60, ndim=2))
    rows.extend(torch.stack([steps([20]), steps([20])]))
    assert rows.write_count == 40


def test_transforms_apply_in_order_to_samples_only():
    buffer = make(transform=lambda sample: sample.set("twice", 2 * sample["step"]))
    buffer.append_transform(lambda sample: sample.set("more", sample["twice"] + 1))
    buffer.extend(steps([20]))
    sample = buffer.sample()
    assert torch.equal(sample["more"], 2 * sample["step"] + 1)
    assert "twice" not in buffer[:]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_epochs_with_prefetch(prefetch):
    buffer = make(sampler=SamplerWithoutReplacement(), prefetch=prefetch)
    buffer.extend(steps([30]))
    for _ in range(10):
        assert sorted(torch.cat([sample["step"] for sample in buffer]).tolist()) == list(range(30))
        buffer.sample()
        assert len(buffer.sample(30)) <= 30


def test_prefetch_is_reproducible_and_hands_errors_on():
    def draws():
        buffer = make(prefetch=2, generator=torch.Generator().manual_seed(1))
        with pytest.raises(UsageError, match="empty"):
            buffer.sample()
        buffer.load_state_dict(buffer.state_dict())  # discards the prefetched failures
        buffer.extend(steps([50]))
        return [buffer.sample()["index"].tolist() for _ in range(5)]

    assert draws() == draws()


def test_pinning_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="pin_memory=True needs a GPU"):
        make(pin_memory=True)


def test_threads():
    """Many threads extend, sample and update concurrently: samples are consistent, and slices are of one trajectory."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(97),
        sampler=SliceSampler(slice_len=4),
        batch_size=16,
        prefetch=2,
    )
    buffer.extend(steps([9, 9, 9]))
    failures = []

    def work(number):
        try:
            for turn in range(60):
                if number % 2:
                    data = steps([5, 7], first=1000 * number + 2 * turn)
                    data["double"] = 2 * data["episode"]
                    buffer.extend(data.exclude("double"))
                else:
                    sample = buffer.sample()
                    assert (sample["episode"].reshape(4, 4) == sample["episode"][::4].unsqueeze(-1)).all()
                    assert (sample["step"].reshape(4, 4).diff(dim=1) == 1).all()
        except Exception as error:  # noqa: BLE001 - reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(buffer) == 97


def test_updates_of_overwritten_steps_are_left_out():
    buffer = make(10, sampler=PrioritizedSampler(10, 1.0, 1.0, 1e-9))
    buffer.extend(steps([10]))
    sample = buffer.sample(50)
    buffer.extend(steps([4]))
    sample["td_error"] = torch.full((50, 1), 5.0)
    buffer.update_tensordict_priority(sample)
    priority = buffer.sampler.state_dict()["tree"]
    assert priority[:4].tolist() == pytest.approx([1.0] * 4)
    drawn = sorted(set(sample["index"][sample["index"] >= 4].tolist()))
    assert priority[drawn].tolist() == pytest.approx([5.0] * len(drawn))


def test_priorities_from_a_sample():
    sampler = PrioritizedSampler(10, 1.0, 1.0, 1e-9)
    buffer = make(10, sampler=sampler, priority_key=("loss", "error"))
    buffer.extend(steps([3]))
    data = TensorDict(
        {"index": torch.tensor([2, 0, 2]), "loss": {"error": torch.tensor([[1.0, 3.0], [4.0, 2.0], [9.0, 0.0]])}}, [3]
    )
    data["collector", "mask"] = torch.tensor([True, True, False])
    buffer.update_tensordict_priority(data)
    assert sampler.state_dict()["tree"][:3].tolist() == pytest.approx([4.0, 1.0, 3.0])
    with pytest.raises(MissingKeyError, match="must have the entries 'index' and"):
        buffer.update_tensordict_priority(data.exclude("index"))


def test_positions_are_checked():
    buffer = make()
    buffer.extend(steps([5]))
    for bad in (torch.tensor([[0]]), torch.tensor([0.0])):
        with pytest.raises(ArgumentError, match=r"Positions must be int64 \[N\]"):
            buffer[bad]
    for bad in (-1, 5, 100):
        with pytest.raises(ArgumentError, match="nothing is stored at"):
            buffer[torch.tensor([bad])]


def test_only_tensordicts():
    with pytest.raises(ArgumentTypeError, match="A TensorDict is needed, got Tensor"):
        make().extend(torch.zeros(3))
    assert len(TensorDictReplayBuffer().extend(steps([3]))) == 3


def test_saved_folders(tmp_path):
    buffer = make(sampler=SliceSampler(slice_len=2))
    with pytest.raises(UsageError, match="The buffer is empty"):
        buffer.dumps(tmp_path / "saved")
    buffer.extend(steps([20, 30]))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("keep me")
    with pytest.raises(UsageError, match="must be empty or hold a saved buffer"):
        buffer.dumps(tmp_path / "other")
    assert (tmp_path / "other" / "notes.txt").exists()
    for _ in range(2):
        buffer.dumps(tmp_path / "saved")
        buffer.extend(steps([7]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "saved"]
    assert TensorDict.load_memmap(tmp_path / "saved" / "storage").shape == (57,)
    wrong = make(99)
    with pytest.raises(ArgumentError, match=r"'max_size': 99.*'max_size': 100"):
        wrong.loads(tmp_path / "saved")
    with pytest.raises(ArgumentError, match="The saved buffer must have"):
        wrong.load_state_dict(buffer.state_dict())
    loaded = TensorDictReplayBuffer(storage=LazyMemmapStorage(100), sampler=SliceSampler(slice_len=2), batch_size=8)
    loaded.loads(tmp_path / "saved")
    loaded.loads(tmp_path / "saved")
    assert (loaded[:] == buffer[:57]).all()
    other = make()
    other.extend(steps([3]).exclude("step"))
    with pytest.raises(ArgumentError, match="Load into a new storage"):
        other.loads(tmp_path / "saved")


def test_state_dict_is_plain(tmp_path):
    buffer = make(generator=torch.Generator().manual_seed(0))
    other = make(generator=torch.Generator())
    for lengths in ([], [20, 30]):
        if lengths:
            buffer.extend(steps(lengths))
        torch.save(buffer.state_dict(), tmp_path / "state.pt")
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert len(other) == len(buffer)
    assert torch.equal(buffer.sample()["index"], other.sample()["index"])


def test_a_plain_buffer_marks_tensordicts():
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=3), batch_size=6)
    buffer.extend(steps([10]))
    sample, info = buffer.sample(return_info=True)
    assert sample["is_init"].squeeze(-1).tolist() == info["starts"].tolist() == [True, False, False] * 2
    assert info["ends"].tolist() == [False, False, True] * 2
    assert torch.equal(info["index"], sample["index"])
    assert torch.equal(info["write_step"], sample["collector", "write_step"])
