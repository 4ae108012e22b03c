"""Fake of CUDA graphs, for machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves


def record(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Run a function, which the first replay would do; later replays run it again and write to the same results.

    Functions change tensors in place, so that a capture can't run them without their effects.
    """
    result = run()
    executed = [True]

    def replay() -> None:
        if executed:
            executed.clear()
            return
        for memory, value in zip(tree_leaves(result), tree_leaves(run()), strict=True):
            if isinstance(memory, torch.Tensor):
                memory.detach().copy_(value)

    return replay, result


def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Replace the capture of CUDA graphs on any device; return the devices of all captures."""
    devices: list[torch.device] = []

    def counted(run: Callable[[], Any], device: torch.device, *generators: torch.Generator) -> Any:
        devices.append(device)
        return record(run)

    monkeypatch.setattr("recurl.execution.capture.record", counted)
    monkeypatch.setattr("recurl.execution.capture.on_side_stream", lambda device: nullcontext())
    return devices
