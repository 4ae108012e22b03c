"""A fake CUDA graph of steps, for machines without a GPU."""

import pytest

from recurl.collectors import captured
from recurl.collectors import collector as collection
from tests.graphs import fake_graphs


@pytest.fixture
def recorded(monkeypatch):
    """Devices of all captures; the CPU is treated as a device that supports graphs."""
    monkeypatch.setattr(captured, "_DEVICE", "cpu")
    monkeypatch.setattr(collection, "CompiledNetwork", lambda network: network)  # whose rounding differs
    return fake_graphs(monkeypatch)
