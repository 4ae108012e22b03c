"""A recording of steps that launches everything again, where there is no GPU."""

import pytest
import torch

from recurl.collectors import captured
from recurl.collectors import collector as collection


def record_again(steps, generator):
    """Record as a graph does: nothing has happened afterwards, and a replay writes to the memory of the results."""
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
    """Count recordings; the CPU is taken for a device that has graphs."""
    count = []

    def record(steps, generator):
        count.append(1)
        return record_again(steps, generator)

    monkeypatch.setattr(captured, "record", record)
    monkeypatch.setattr(captured, "_DEVICE", "cpu")
    monkeypatch.setattr(collection, "CompiledNetwork", lambda network: network)  # which rounds in its own way
    return count
