"""The backend cached by a network is always the one currently requested."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from recurl.modules import LSTM
from recurl.recurrence import BACKENDS, DEFAULT_OPTIONS, Boundaries, record_backends, register_backend


def run(net: LSTM, name: str) -> list[str]:
    """Return the names of the backends that run."""
    boundaries = Boundaries.of_rows((2, 3))
    with record_backends() as ran:
        net.run(torch.randn(2, 3, 4), None, boundaries, name, DEFAULT_OPTIONS)
    return ran


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch):
    """Return a function that reduces the registry to that of a process with only the named backend added."""
    before = dict(BACKENDS._backends), list(BACKENDS._fast), BACKENDS.version
    for name in ("_backends", "_fast", "version"):
        monkeypatch.setattr(BACKENDS, name, getattr(BACKENDS, name))

    def add(name: str) -> None:
        BACKENDS._backends, BACKENDS._fast, BACKENDS.version = dict(before[0]), list(before[1]), before[2]
        loop = BACKENDS.named("loop")
        parts = {part: getattr(loop, part) for part in ("cells", "missing", "unsupported", "run")}
        register_backend(type("Named", (), {**parts, "name": name})(), fast=True)

    return add


def test_an_unpickled_network_uses_the_backends_of_this_process(registry) -> None:
    registry("theirs")
    net = LSTM(4, 5)
    assert run(net, "fastest") == ["loop"]
    saved = pickle.dumps(net)
    registry("ours")
    assert run(pickle.loads(saved), "fastest") == ["loop"]


def test_another_thread_that_runs_the_network_by_another_backend_changes_nothing() -> None:
    class Interrupted(LSTM):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_selection" and "loop" in str(value):  # the interpreter may switch threads here
                assert run(self, "pad") == ["pad"]

    assert run(Interrupted(4, 5), "loop") == ["loop"]
