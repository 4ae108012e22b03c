"""The recurrent mode of threads and tasks."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from tensordict import TensorDict

from recurl.modules import (
    GRUModule,
    recurrent_mode,
    set_recurrent_mode,
)


def test_modes_nest_and_restore() -> None:
    assert recurrent_mode() is None
    with set_recurrent_mode("Recurrent"):
        assert recurrent_mode() is True
        with set_recurrent_mode("sequential"):
            assert recurrent_mode() is False
        with pytest.raises(ZeroDivisionError), set_recurrent_mode(None):
            raise ZeroDivisionError
        assert recurrent_mode() is True
    assert recurrent_mode() is None


def test_one_instance_may_be_entered_repeatedly() -> None:
    block = set_recurrent_mode(True)
    with block, set_recurrent_mode(False), block:
        assert recurrent_mode() is True
    assert recurrent_mode() is None


def test_mode_as_decorator_of_functions_and_generators() -> None:
    @set_recurrent_mode(True)
    def function() -> bool | None:
        return recurrent_mode()

    @set_recurrent_mode(True)
    def generator() -> object:
        received = yield recurrent_mode()
        yield (received, recurrent_mode())
        return "done"

    assert function() is True
    items = generator()
    assert next(items) is True
    assert recurrent_mode() is None
    assert items.send("value") == ("value", True)
    with pytest.raises(StopIteration, match="done"):
        next(items)


def test_mode_of_other_threads_and_tasks_is_untouched() -> None:
    seen: list[bool | None] = []
    with set_recurrent_mode(True):
        thread = threading.Thread(target=lambda: seen.append(recurrent_mode()))
        thread.start()
        thread.join()
    assert seen == [None]

    async def hold(mode: bool) -> bool | None:
        with set_recurrent_mode(mode):
            await asyncio.sleep(0.01)
            return recurrent_mode()

    async def both() -> list[bool | None]:
        return await asyncio.gather(hold(True), hold(False))

    assert asyncio.run(both()) == [True, False]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_blocks_around_a_scan_end() -> None:
    """Torch's tracer drops attributes that are set after a scan."""
    module = GRUModule(2, 3, in_key="x", out_key="y", recurrent_backend="scan")
    flags = torch.zeros(2, 5, 1, dtype=torch.bool)

    def features(x: torch.Tensor) -> torch.Tensor:
        with set_recurrent_mode(True):
            return module(TensorDict({"x": x, "is_init": flags}, [2, 5]))["y"]

    compiled = torch.compile(features, fullgraph=True, backend="eager")
    for x in torch.randn(2, 2, 5, 2):
        torch.testing.assert_close(compiled(x), features(x))
        assert recurrent_mode() is None


def test_bad_modes() -> None:
    with pytest.raises(ValueError, match="'recurrent' or 'sequential', got 'both'"):
        set_recurrent_mode("both")
    with pytest.raises(TypeError, match="must be a bool, a string or None, got int"):
        set_recurrent_mode(1)
