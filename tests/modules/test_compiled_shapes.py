"""Recurrent modules under torch.compile after any previous shapes: torch.compile specializes sizes of 1."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from recurl.modules import GRUModule, LSTMModule, set_recurrent_mode
from recurl.modules.recurrent import RecurrentModule

# torch's tracing of an autograd.Function warns.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")]


def make_batch(module: RecurrentModule, shape: tuple[int, ...], trailing: tuple[int, ...]) -> TensorDict:
    states = {
        key: torch.randn(*shape, 1, size) for key, size in zip(module.state_keys, module.net.state_sizes, strict=True)
    }
    is_init = torch.rand(*shape, *trailing, 1)[..., 0] < 0.3
    return TensorDict({"x": torch.randn(*shape, 3), "is_init": is_init, **states}, shape)


def check(module: RecurrentModule, dynamic: bool | None, trailing: tuple[int, ...], shapes: list) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="eager")
    for shape in shapes:
        batch = make_batch(module, shape, trailing)
        found, expected = compiled(batch.clone()), module(batch.clone())
        for key in module.out_keys:
            torch.testing.assert_close(found[key], expected[key])


@pytest.mark.parametrize(
    ("kind", "dynamic", "trailing", "shapes"),
    [
        (LSTMModule, None, (1,), [(2,), (3,), (1,)]),
        (GRUModule, True, (), [(2, 3), (3, 4), (1, 1), (2, 1)]),
        (GRUModule, None, (1,), [()]),
    ],
)
def test_steps(kind: type[RecurrentModule], dynamic: bool | None, trailing: tuple[int, ...], shapes: list) -> None:
    check(kind(3, 4, in_key="x", out_key="y"), dynamic, trailing, shapes)


@pytest.mark.parametrize(
    ("backend", "kind", "dynamic", "trailing", "shapes"),
    [
        ("loop", GRUModule, None, (), [(2, 3), (3, 5), (1, 1)]),
        pytest.param("scan", LSTMModule, True, (1,), [(5,), (6,), (1,)], marks=pytest.mark.full),
    ],
)
def test_sequences(
    backend: str, kind: type[RecurrentModule], dynamic: bool | None, trailing: tuple[int, ...], shapes: list
) -> None:
    with set_recurrent_mode(True):
        check(kind(3, 4, in_key="x", out_key="y", recurrent_backend=backend), dynamic, trailing, shapes)
