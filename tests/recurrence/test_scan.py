"""Scan backend tests beyond the contract: behavior under torch.compile, and the length of the scan."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from recurl.modules import GRUModule, set_recurrent_mode
from recurl.recurrence import BACKENDS, LSTM, Boundaries, Support
from recurl.recurrence.scan import _layout  # the length of the scan isn't visible elsewhere

from .contract import Case, assert_agree
from .test_ops import make_batch, make_module, outputs_and_gradients

# Tracing an autograd.Function makes torch warn.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")]


@pytest.mark.parametrize("pattern", ["none", "random", "every"])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_many_chunks(cell: str, pattern: str) -> None:
    """More tokens than fit in one chunk, so that segments and chunks overlap in all ways."""
    case = Case(cell, shape=(1, 333), pattern=pattern)
    assert_agree(case.outputs_and_gradients("scan"), case.outputs_and_gradients("reference"), 1e-10)


def test_the_scan_is_as_long_as_a_chunk_and_a_segment() -> None:
    is_init = torch.zeros(4096, dtype=torch.bool)
    is_init[::32] = True
    layout = _layout(Boundaries.from_is_init(is_init))
    steps, chunks = layout.grid.shape
    size = math.isqrt(32 * 4096 // 8)  # geometric mean of the longest segment and all tokens, scaled
    assert steps <= size + 32
    assert chunks == 4096 // size + 2
    assert torch.equal(layout.grid.flatten()[layout.place], torch.arange(4096))


@pytest.mark.parametrize(
    ("cell", "options", "shapes"),
    [
        pytest.param(
            "lstm", {"proj_size": 6, "recurrent_recompute": "full"}, [(3, 11), (4, 29)], marks=pytest.mark.full
        ),
        ("gru", {"bias": False}, [(97,), (140,)]),
    ],
)
def test_compiles_as_one_graph(cell: str, options: dict, shapes: list[tuple[int, ...]]) -> None:
    module = make_module(cell, **options)
    module.recurrent_backend = "scan"
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    with set_recurrent_mode(True), torch._dynamo.config.patch(error_on_recompile=True):
        for shape in shapes:
            batch = make_batch(module, *shape)
            actual = outputs_and_gradients(module, compiled, batch)
            torch.testing.assert_close(actual, outputs_and_gradients(module, module, batch))


@pytest.mark.full
def test_compiles_layers_and_dropout() -> None:
    torch._dynamo.reset()
    module = make_module("lstm", num_layers=2, dropout=1.0)  # so that the second layer sees zeros
    module.recurrent_backend = "scan"
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with set_recurrent_mode(True):
        batch = make_batch(module, 3, 11)
        actual = outputs_and_gradients(module, compiled, batch)
        torch.testing.assert_close(actual, outputs_and_gradients(module, module, batch))


@pytest.fixture
def no_scalars() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=False):
        yield


@pytest.mark.usefixtures("no_scalars")
def test_compiles_both_directions_and_leaves_the_compiler_as_it_is() -> None:
    torch._dynamo.reset()
    module = make_module("lstm", bidirectional=True)
    module.recurrent_backend = "scan"
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with set_recurrent_mode(True):
        batch = make_batch(module, 3, 11).select("obs", "is_init")  # without states, so they are zero
        actual = outputs_and_gradients(module, compiled, batch)
        torch.testing.assert_close(actual, outputs_and_gradients(module, module, batch))
    assert not torch.compiler.config.capture_scalar_outputs


@pytest.mark.usefixtures("no_scalars")
def test_compiles_where_the_graph_may_break() -> None:
    torch._dynamo.reset()
    module = make_module("gru")
    module.recurrent_backend = "scan"
    compiled = torch.compile(module, backend="aot_eager")
    with set_recurrent_mode(True), torch.no_grad():
        batch = make_batch(module, 3, 11)
        torch.testing.assert_close(compiled(batch.clone()), module(batch.clone()))


def test_compiles_tensors_that_share_memory() -> None:
    torch._dynamo.reset()
    module = make_module("lstm")
    module.recurrent_backend = "scan"
    parameters = list(module.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])  # flat, as for cuDNN
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    h, c = module.state_keys
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with set_recurrent_mode(True):
        batch = make_batch(module, 3, 11)
        actual, expected = (
            outputs_and_gradients(module, lambda batch, run=run: run(batch.set(c, batch[h])), batch)
            for run in (compiled, module)
        )
        torch.testing.assert_close(actual, expected)


@pytest.mark.full  # linear/test_ops.py compiles the scan of a linear recurrence
def test_inductor() -> None:
    """Full compilation once: "auto" selects the scan, and two layers read the same lengths."""
    torch._dynamo.reset()
    module = GRUModule(5, 7, num_layers=2, in_key="obs", out_key="features", recurrent_backend="auto")
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with set_recurrent_mode(True):
        batch = make_batch(module, 2, 7)
        actual = outputs_and_gradients(module, compiled, batch)
        module.recurrent_backend = "loop"
        torch.testing.assert_close(actual, outputs_and_gradients(module, module, batch))


def test_auto_is_scan_while_compiling() -> None:
    support = Support(LSTM, torch.device("cpu"), compiling=True)
    assert BACKENDS.choose("auto", support).name == "scan"
