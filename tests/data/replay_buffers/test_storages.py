from __future__ import annotations

import gc
import os
import signal
import sys
import warnings

import pytest
import torch
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError, UsageError
from recurl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from recurl.data.replay_buffers import Storage

TENSORS = [LazyTensorStorage, LazyMemmapStorage]


def batch(*shape, start=0):
    number = start + torch.arange(torch.Size(shape).numel()).reshape(shape)
    return TensorDict({"a": number, "deep": {"b": number.unsqueeze(-1).expand(*shape, 3).float()}}, shape)


@pytest.mark.parametrize("make", [*TENSORS, ListStorage])
def test_a_ring_of_steps(make):
    buffer = ReplayBuffer(storage=make(5), batch_size=2)
    assert buffer.extend(batch(3)).tolist() == [0, 1, 2]
    assert len(buffer) == 3
    assert buffer.extend(batch(4, start=3)).tolist() == [3, 4, 0, 1]
    assert len(buffer) == 5
    assert buffer.add(batch(1, start=7)[0]).tolist() == 2
    stored = buffer[:]
    assert stored["a"].tolist() == [5, 6, 7, 3, 4]
    assert torch.equal(stored["deep", "b"][:, 1], stored["a"].float())
    assert buffer[torch.tensor([4, 0, 0])]["a"].tolist() == [4, 5, 5]
    assert buffer[-1]["a"].item() == 4
    assert buffer[1:3]["a"].tolist() == [6, 7]


@pytest.mark.parametrize("make", TENSORS)
def test_rows_continue_across_calls(make):
    buffer = TensorDictReplayBuffer(storage=make(13, ndim=3), batch_size=4)
    assert buffer.extend(batch(2, 1, 4)).tolist() == [[[0, 1, 2, 3]], [[6, 7, 8, 9]]]
    assert len(buffer) == 8
    assert buffer[:]["a"].tolist() == list(range(8))
    assert buffer.extend(batch(2, 1, 3, start=10)).tolist() == [[[4, 5, 0]], [[10, 11, 6]]]
    assert buffer[:]["a"].tolist() == [12, 1, 2, 3, 10, 11, 15, 5, 6, 7, 13, 14]
    assert buffer.add(batch(2, 1, start=20)).tolist() == [[1], [7]]
    assert buffer[torch.tensor([1, 7])]["a"].tolist() == [20, 21]
    sample = buffer.sample(100)
    assert sample.shape == (100,)
    assert torch.equal(sample["a"], buffer[sample["index"]]["a"])


def test_items_of_several_steps():
    """With ndim=1 a batch [B, T] is B items; each row of a sample is a separate segment."""
    data = batch(4, 3)
    data["is_init"] = torch.zeros(4, 3, 1, dtype=torch.bool)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    buffer.extend(data)
    sample = buffer.sample()
    assert sample.shape == (2, 3)
    assert sample["is_init"].squeeze(-1).tolist() == [[True, False, False]] * 2
    assert not sample["collector", "stored", "is_init"].any()
    assert sample["index"].shape == (2, 3)
    assert buffer.extend(sample).tolist() == [0, 1]
    assert not buffer[:]["is_init"].any()


def test_priorities_of_items_of_several_steps():
    sampler = PrioritizedSampler(4, 1.0, 1.0, 1e-9)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=8)
    buffer.extend(batch(4, 3))
    sample = buffer.sample()
    sample["td_error"] = sample["index"].unsqueeze(-1) + torch.tensor([0.0, 2.0, 1.0])[:, None]
    buffer.update_tensordict_priority(sample)
    drawn = sorted(set(sample["index"][:, 0].tolist()))
    assert sampler.state_dict()["tree"][drawn].tolist() == pytest.approx([2.0 + place for place in drawn])


@pytest.mark.parametrize("make", TENSORS)
def test_tensors(make, tmp_path):
    buffer = ReplayBuffer(storage=make(5), batch_size=3)
    buffer.extend(torch.arange(12.0).reshape(6, 2)[:4])
    assert buffer.sample().shape == (3, 2)
    assert buffer[3].tolist() == [6.0, 7.0]
    assert buffer.add(torch.tensor([8.0, 9.0])).item() == 4
    buffer.dumps(tmp_path / "saved")
    other = ReplayBuffer(storage=make(5), batch_size=3)
    other.loads(tmp_path / "saved")
    assert torch.equal(other[:], buffer[:])


def test_any_objects(tmp_path):
    buffer = ReplayBuffer(storage=ListStorage(3), batch_size=2)
    buffer.extend(["a", {"b": 1}])
    buffer.add("c")
    assert buffer[:] == ["a", {"b": 1}, "c"]
    assert buffer.extend(["d"]).tolist() == [0]
    assert buffer[0] == "d"
    assert len(buffer.sample()) == 2
    buffer.dumps(tmp_path / "saved")
    other = ReplayBuffer(storage=ListStorage(3))
    other.loads(tmp_path / "saved")
    assert other[:] == buffer[:]
    assert ReplayBuffer().extend(["x"]).tolist() == [0]


def test_stored_data_is_a_copy():
    for make in (*TENSORS, ListStorage):
        buffer, data = ReplayBuffer(storage=make(5), batch_size=2), batch(3)
        buffer.extend(data)
        data["a"].zero_()
        assert buffer[:]["a"].tolist() == [0, 1, 2]


def test_gradients_are_not_stored():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=2)
    buffer.extend(torch.ones(3, requires_grad=True) * 2)
    assert not buffer[:].requires_grad


def test_files_on_disk(tmp_path):
    storage = LazyMemmapStorage(1_000_000, scratch_dir=tmp_path / "files")
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=2)
    buffer.extend(batch(10))
    mapped = TensorDict.load_memmap(tmp_path / "files")
    assert mapped.shape == (1_000_000,)
    assert mapped["a"][:10].tolist() == list(range(10))
    other = TensorDictReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "files"))
    with pytest.raises(UsageError, match="must be empty"):
        other.extend(batch(2))
    del buffer, storage
    gc.collect()
    assert (tmp_path / "files").exists()


KILLED = """
import os, signal, torch
from recurl.data import LazyMemmapStorage, ReplayBuffer
buffer = ReplayBuffer(storage=LazyMemmapStorage(100))
buffer.extend(torch.arange(10))
os.kill(os.getpid(), signal.{})
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_killed_process_leaves_no_files(tmp_path, programs, name):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = programs.run([sys.executable, "-c", KILLED.format(name)], env=environment)
    assert ended.returncode == -signal.Signals[name]
    assert not list(tmp_path.iterdir())


def test_a_fork_that_ends_takes_nothing_away():
    buffer = ReplayBuffer(storage=LazyMemmapStorage(100))
    buffer.extend(torch.arange(10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pytest may have threads, in whose presence forking warns
        child = os.fork()
    if child == 0:
        del buffer
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert buffer.extend(torch.arange(10, 20)).tolist() == list(range(10, 20))
    assert buffer[:].tolist() == list(range(20))


def test_the_device_may_be_that_of_the_data():
    storage = LazyTensorStorage(4, device="auto")
    ReplayBuffer(storage=storage).extend(batch(2))
    assert storage.device == torch.device("cpu")
    assert LazyTensorStorage(4, device="meta").device == "meta"


@pytest.mark.parametrize("make", TENSORS)
def test_errors(make):
    for arguments in ({"max_size": 0}, {"max_size": 3, "ndim": 0}):
        with pytest.raises(ArgumentError, match="max_size and ndim must be positive"):
            make(**arguments)
    buffer = ReplayBuffer(storage=make(8, ndim=2))
    with pytest.raises(ArgumentError, match="ndim=2 needs data with at least as many batch dimensions"):
        buffer.extend(batch(3))
    with pytest.raises(ArgumentError, match="Data of 9 rows doesn't fit"):
        buffer.extend(batch(9, 1))
    buffer.extend(batch(2, 3))
    with pytest.raises(ArgumentError, match="must have 2 rows, one per lane of the storage, got 3 rows"):
        buffer.extend(batch(3, 1))
    with pytest.raises(ArgumentError, match="5 steps can't be stored at once, as there is room for 4"):
        buffer.extend(batch(2, 5))
    with pytest.raises(ArgumentError, match="these differ: a"):
        buffer.extend(batch(2, 3).exclude("a"))
    with pytest.raises(ArgumentError, match=r"'a' is stored with shape .* and dtype torch.int64"):
        buffer.extend(batch(2, 3).apply(torch.Tensor.float))
    with pytest.raises(ArgumentTypeError, match="got list: use ListStorage"):
        buffer.extend([1, 2])
    assert buffer[:]["a"].tolist() == list(range(6)), "nothing changed"
    with pytest.raises(ArgumentError, match="nothing is stored at"):
        buffer[torch.tensor([3])]
    with pytest.raises(ArgumentError, match="no entry 'h' in the storage"):
        buffer.storage.write(torch.tensor([0]), {"h": torch.zeros(1)})


def test_errors_of_lists():
    buffer = ReplayBuffer(storage=ListStorage(3))
    with pytest.raises(ArgumentTypeError, match="A batch must be a TensorDict, a tensor or a list of items, got int"):
        buffer.extend(3)
    with pytest.raises(UnsupportedError, match="ListStorage can't change single entries"):
        buffer.storage.write(torch.tensor([0]), {})
    assert issubclass(ListStorage, Storage)
