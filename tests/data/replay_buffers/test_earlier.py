"""Buffers saved by earlier versions, on the host (formats 1 and 2) and on the device (format 1), load into both kinds.

The files in ``earlier`` were written by version 0.2.0 after two of the batches of :func:`pieces`, 14 steps in rows of
9, and some new priorities.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from recurl.core.archive import load_archive
from recurl.data import LazyTensorStorage, PrioritizedSliceSampler, TensorDictReplayBuffer
from recurl.data.replay_buffers.device import DeviceSliceBuffer
from recurl.execution.lowering import leaves
from recurl.execution.readback import refuse_read_back
from tests.data.replay_buffers.test_device import CAPACITY, DRAWINGS, HOST, batches

FILES = Path(__file__).with_name("earlier")
SIZE = 2 * CAPACITY
KINDS = ["step", "trajectory", "priority_step", "priority_trajectory"]


def pieces():
    for batch in batches(2, [step % 5 == 4 for step in range(100)], [7, 7, 3]):
        batch["image"] = (batch["step"] % 250).to(torch.uint8).reshape(2, -1, 1, 1).expand(-1, -1, 2, 2).contiguous()
        batch["next", "image"] = batch["image"] + 1
        yield batch


def buffers(kind):
    """An empty buffer of each kind."""
    host = TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE, ndim=2), sampler=HOST[kind](3, SIZE), batch_size=12)
    return [host, *(DeviceSliceBuffer(SIZE, 4, 3, DRAWINGS[kind](), padded=padded) for padded in (True, False))]


@pytest.mark.parametrize("saved_on", ["host", "device"])
@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_the_same_steps_runs_and_priorities(kind, saved_on):
    state = load_archive(FILES / f"{saved_on}_{KINDS[kind]}.pt")
    first, second, third = pieces()
    prioritized = KINDS[kind].startswith("priority")
    for loaded, expected in zip(buffers(kind), buffers(kind), strict=True):
        for batch in (first, second):
            expected.extend(batch)
        if prioritized:
            at = torch.tensor([1, 3, 4, 11, 16])
            rule_of(expected).assign(expected._index, at, at.double() / 4)
        loaded.load_state_dict(state)
        check_same(loaded, expected)
        with refuse_read_back() if getattr(loaded, "padded", False) else nullcontext():
            loaded.extend(third)
        expected.extend(third)
        check_same(loaded, expected)
        if prioritized:
            got, wanted = (rule_of(buffer).state_dict() for buffer in (loaded, expected))
            torch.testing.assert_close(got["tree"], wanted["tree"], rtol=1e-14, atol=0)
            assert got["max_priority"] == wanted["max_priority"]


def rule_of(buffer):
    return buffer.drawing if isinstance(buffer, DeviceSliceBuffer) else buffer.sampler._priorities


def check_same(loaded, expected):
    index, wanted = loaded._index, expected._index
    positions = wanted.all_positions()
    assert torch.equal(index.steps(positions), wanted.steps(positions))
    for got, bound in zip(*(i.bounds(i.run_at(positions)) for i in (index, wanted)), strict=True):
        assert torch.equal(got, bound)
    assert (loaded[:] == expected[:]).all()
    samples = []
    for buffer in (loaded, expected):
        torch.manual_seed(0)
        samples.append(dict(leaves(buffer.sample())))
    assert all(torch.equal(value, samples[1][path]) for path, value in samples[0].items())


@pytest.mark.parametrize("kind", [2, 3], ids=KINDS[2:])
def test_priorities_of_positions_that_rows_do_not_divide(kind):
    state = load_archive(FILES / f"host_{KINDS[kind]}.pt")
    state["max_size"] = SIZE + 1  # the sampler has one position more than the rows
    for name in ("tree", "priorities"):
        state["sampler"][name] = torch.cat([state["sampler"][name], torch.zeros(1, dtype=torch.float64)])
    host = TensorDictReplayBuffer(
        storage=LazyTensorStorage(SIZE + 1, ndim=2), sampler=HOST[kind](3, SIZE + 1), batch_size=12
    )
    device = DeviceSliceBuffer(SIZE + 1, 4, 3, DRAWINGS[kind](), padded=False)
    host.load_state_dict(state)
    device.load_state_dict(state)
    check_same(device, host)
    device.load_state_dict(host.state_dict())
    host.load_state_dict(device.state_dict())
    check_same(device, host)


@pytest.mark.parametrize("earlier", [False, True], ids=["current", "earlier"])
@pytest.mark.parametrize("kind", [2, 3], ids=KINDS[2:])
def test_priorities_saved_under_another_rule(kind, earlier):
    other = 5 - kind
    saved, loaded, expected = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE, ndim=2), sampler=HOST[rule](3, SIZE), batch_size=12)
        for rule in (other, kind, kind)
    )
    if earlier:
        state = load_archive(FILES / f"host_{KINDS[other]}.pt")
        expected.load_state_dict(load_archive(FILES / f"host_{KINDS[kind]}.pt"))
    else:
        for batch in pieces():
            saved.extend(batch)
            expected.extend(batch)
        state = saved.state_dict()
    loaded.load_state_dict(state)
    for buffer in (loaded, expected):
        buffer.sample()
    got, wanted = (buffer.sampler.state_dict() for buffer in (loaded, expected))
    assert torch.equal(got["tree"], wanted["tree"])
    torch.testing.assert_close(got["sums"], wanted["sums"], rtol=1e-14, atol=0)


def test_priorities_saved_with_slices_of_any_length():
    def make(strict):
        sampler = PrioritizedSliceSampler(SIZE, 0.7, 0.5, slice_len=3, strict_length=strict)
        return TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE, ndim=2), sampler=sampler, batch_size=600)

    saved, strict = make(False), make(True)
    for batch in pieces():
        saved.extend(batch)
    saved.sample()
    strict.load_state_dict(saved.state_dict())
    assert len(strict.sample()) == 600
