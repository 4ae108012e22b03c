"""A fake CUDA graph of training steps, for machines without a GPU."""

import pytest

from tests.graphs import fake_graphs


@pytest.fixture
def anywhere(monkeypatch):
    """Devices of all captures of training steps, which run on any device."""
    monkeypatch.setattr("recurl.trainers.optim.cuda_graph.check_devices", lambda module: None)
    return fake_graphs(monkeypatch)
