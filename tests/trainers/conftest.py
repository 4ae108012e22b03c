"""A fake CUDA graph of training steps, for machines without a GPU."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._pytree import tree_leaves


def record_step(run, device, *generators):
    """Run a step, which the first replay would do; later replays run it again and write to the memory of its results.

    Optimizers change their tensors in place, so that a capture can't run the step without its effects.
    """
    result = run()
    executed = [True]

    def replay():
        if executed:
            executed.clear()
            return
        for memory, value in zip(tree_leaves(result), tree_leaves(run()), strict=True):
            if isinstance(memory, torch.Tensor):
                memory.detach().copy_(value)

    return replay, result


@pytest.fixture
def anywhere(monkeypatch):
    """Count captures of training steps, which run on any device."""
    count = []

    def record(run, device, *generators):
        count.append(device)
        return record_step(run, device, *generators)

    monkeypatch.setattr("recurl.trainers.optim.cuda_graph.check_devices", lambda module: None)
    monkeypatch.setattr("recurl.trainers.optim.cuda_graph.on_side_stream", lambda device: nullcontext())
    monkeypatch.setattr("recurl.trainers.optim.cuda_graph.record", record)
    return count
