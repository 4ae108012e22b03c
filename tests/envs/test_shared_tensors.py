"""Tensors in memory shared with workers."""

import os
import sys

import pytest
import torch

from recurl.envs.workers_memory import Entry, SharedTensors


@pytest.mark.parametrize("sizes", [[1], [3, 5, 0, 7], [16, 1, 17], [64, 65, 63]])
def test_entries_have_their_own_memory(sizes: list[int]) -> None:
    kinds = [torch.float32, torch.bool, torch.int64, torch.uint8]
    entries = [Entry(str(place), (size, 2), kinds[place]) for place, size in enumerate(sizes)]
    shared = SharedTensors(entries)
    try:
        values = {entry.key: torch.randint(0, 2, entry.shape).to(entry.dtype) for entry in entries}
        for key, value in values.items():
            shared.tensors[key].copy_(value)
        for entry in entries:
            found = shared.tensors[entry.key]
            assert (found.shape, found.dtype) == (torch.Size(entry.shape), entry.dtype)
            assert torch.equal(found, values[entry.key])
    finally:
        shared.close()


@pytest.mark.skipif(sys.platform != "linux", reason="lists open files in /proc")
def test_no_file_stays_open_without_the_object_and_its_tensors() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    shared = SharedTensors([Entry("reward", (2,), torch.float32)])
    reward = shared.tensors["reward"].zero_()
    del shared
    assert reward.tolist() == [0.0, 0.0]
    del reward
    assert sorted(os.listdir("/proc/self/fd")) == before
