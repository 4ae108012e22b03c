"""A fake capture of steps that runs everything again, for machines without a GPU."""

import pytest
import torch

from recurl.collectors import captured
from recurl.collectors import collector as collection


def record_again(steps, device, generator):
    """Capture as a graph does: without side effects, and with replays that write to the memory of the results."""
    before = generator.get_state()
    with torch.random.fork_rng():
        kept = [[part.clone() for part in step] for step in steps()]
    generator.set_state(before)

    def replay():
        for memory, step in zip(kept, steps(), strict=True):
            for part, value in zip(memory, step, strict=True):
                part.copy_(value)

    return replay, kept


@pytest.fixture
def recorded(monkeypatch):
    """Count captures; the CPU is treated as a device that supports graphs."""
    count = []

    def record(steps, device, generator):
        count.append(1)
        return record_again(steps, device, generator)

    monkeypatch.setattr(captured, "record", record)
    monkeypatch.setattr(captured, "_DEVICE", "cpu")
    monkeypatch.setattr(collection, "CompiledNetwork", lambda network: network)  # whose rounding differs
    return count
