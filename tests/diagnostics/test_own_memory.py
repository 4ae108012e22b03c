"""User-written recurrent modules: correct ones pass, and each mistake fails a specific check."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.diagnostics import own_memory as own
from tests.diagnostics.policies import actor_of, failures, linear, refused, zero
from tests.pairs import paired

pytestmark = pytest.mark.slow


def policy_with(memory: own.OwnMemory, head: nn.Module | None = None) -> nn.Module:
    return actor_of(memory, linear(8) if head is None else head)


@pytest.mark.parametrize(
    ("kind", "rows"),
    paired(
        [own.OwnMemory, own.Frames, own.StoredFrames, own.Attending, own.Counting, own.Seen, own.Choosing], [None, 3]
    ),
)
def test_sound(kind: type[own.OwnMemory], rows: int | None) -> None:
    torch.manual_seed(0)
    memory = kind()
    assert failures(policy_with(memory), memory.env(rows)) == []


@pytest.mark.parametrize(("kind", "rows"), paired([own.FromZero, own.FramesFromZero, own.TorchGRUFromZero], [None, 3]))
@pytest.mark.parametrize("zeros", [False, True], ids=["head", "zero head"])
def test_sequences_that_start_from_zero(kind: type[own.OwnMemory], zeros: bool, rows: int | None) -> None:
    memory, head = kind(), linear(8)
    result = refused(policy_with(memory, zero(head) if zeros else head), memory.env(rows), "start")
    assert "of sequences that begin inside an episode, and of the full episodes, differ" in result.detail
    assert "start each sequence from the states stored at its first step, 'own'" in result.fix
    assert "LSTMModule, GRUModule or CellModule" in result.fix


MISTAKES = {
    "never_updating": (own.NeverUpdating, "memory", "zero after every step: there is no memory"),
    "not_resetting": (own.NotResetting, "leak", "with other data before the boundary"),
    "learned_start": (own.LearnedStart, "replay", "as collected and as replayed"),
    "backwards": (own.Backwards, "leak", "with other data before the boundary"),
}


@pytest.mark.parametrize(("kind", "name", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_other_mistakes(kind: type[own.OwnMemory], name: str, words: str) -> None:
    memory = kind()
    assert words in refused(policy_with(memory), memory.env(3), name).detail
