"""Once TorchRL is imported, both libraries share one recurrent mode, and either can set it."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading

import pytest
import torch
import torchrl.modules
from tensordict import TensorDict

from recurl.modules import GRUModule, recurrent_mode, set_recurrent_mode
from tests.interop.pairs import RECURL, TORCHRL

LIBRARIES = {"torchrl": TORCHRL, "recurl": RECURL}


@pytest.mark.parametrize("names", list(itertools.product(LIBRARIES, repeat=3)), ids="-".join)
@pytest.mark.parametrize("modes", list(itertools.product([True, False], repeat=3)), ids=str)
def test_the_innermost_block_decides(names: tuple[str, ...], modes: tuple[bool, ...]) -> None:
    def enter(depth: int) -> None:
        if depth == len(names):
            return
        with LIBRARIES[names[depth]].set_recurrent_mode(modes[depth]):
            seen()
            enter(depth + 1)
            seen()

    def seen() -> None:
        readings.append((recurrent_mode(), bool(torchrl.modules.recurrent_mode())))

    readings: list[tuple[bool | None, bool]] = []
    enter(0)
    assert readings == [(mode, mode) for mode in (*modes, *reversed(modes))]
    assert recurrent_mode() is None
    assert torchrl.modules.recurrent_mode() is None


@pytest.mark.parametrize("mode", [True, False])
def test_none_inside_the_other_library_is_no_override(mode: bool) -> None:
    with torchrl.modules.set_recurrent_mode(mode), set_recurrent_mode(None):
        assert recurrent_mode() is None
        assert torchrl.modules.recurrent_mode() is None


def test_blocks_end_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), torchrl.modules.set_recurrent_mode(False), set_recurrent_mode(True):
        raise ZeroDivisionError
    assert recurrent_mode() is None
    assert torchrl.modules.recurrent_mode() is None


def test_other_threads_are_untouched() -> None:
    seen = []
    with torchrl.modules.set_recurrent_mode(True):
        thread = threading.Thread(target=lambda: seen.append(recurrent_mode()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_compiled_modules_follow(library: str) -> None:
    torch._dynamo.reset()
    gru = GRUModule(3, 4, in_key="observation", out_key="features", recurrent_backend="loop")
    compiled = torch.compile(gru, fullgraph=True, backend="aot_eager")
    batch = TensorDict({"observation": torch.randn(5, 3), "is_init": torch.zeros(5, 1, dtype=torch.bool)}, [5])
    found, expected = [], []
    for mode in (False, True, False):
        with LIBRARIES[library].set_recurrent_mode(mode), torch.no_grad():
            found.append(compiled(batch.clone())["features"])
            expected.append(gru(batch.clone())["features"])
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found[0], found[1])


@pytest.mark.slow
def test_recurl_does_not_import_torchrl() -> None:
    program = "import sys, recurl.trainers, recurl.cli, recurl.modules.interop; sys.exit('torchrl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_block_that_is_open_while_torchrl_is_imported_still_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    block = set_recurrent_mode(True)
    with monkeypatch.context() as before:
        before.delitem(sys.modules, "torchrl.modules")
        block.__enter__()
    try:
        assert recurrent_mode() is True
        with torchrl.modules.set_recurrent_mode(False):
            assert recurrent_mode() is False
        assert recurrent_mode() is True
    finally:
        block.__exit__(None, None, None)
    assert recurrent_mode() is None
