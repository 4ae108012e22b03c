"""Tensors in memory shared with workers."""

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
