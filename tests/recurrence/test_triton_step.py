from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from recurl.recurrence import GRU, LSTM, LayerWeights, Options, step_stack
from recurl.recurrence.cuda.step import operation as step_module
from recurl.recurrence.cuda.step.config import pays, tile_for_step
from tests.programs import Programs

from .kernel_tests import core_and_rest, run

pytestmark = pytest.mark.slow

ERRORS = {
    "ieee": 1e-6,
    "tf32x3": 1e-6,
    "tf32": 1e-3,
    "bf16": 1e-2,
    "bf16 products": 1e-2,
    "one bias": 1e-6,
    "layout": 0,
    "tile": 1e-6,
    "operator": 0,
    "isolation": 0,
    "module": 2e-6,
}
CHECKS = {f"{cell} {name}": limit for cell in ("lstm", "gru") for name, limit in ERRORS.items()} | {"served": 0}
CORE = "lstm one bias", "gru one bias", "gru operator", "lstm isolation"
# Cell, hidden size, rows and precision.
COMPILED = {
    "80": (["step,gru,100,1,ieee"], 163 * 1024),
    "89": (["step,lstm,256,64,tf32", "step,lstm,256,16384,tf32", "step,lstm,256,1024,ieee"], 99 * 1024),
    "90": (
        [
            "step,lstm,256,1,tf32",
            "step,gru,256,1024,tf32",
            "step,lstm,128,16384,tf32",
            "step,lstm,128,16384,ieee",
            "step,gru,5,16384,bf16",
        ],
        227 * 1024,
    ),
}
SPILLED = 48  # bytes


@pytest.mark.parametrize("names", core_and_rest(CORE, CHECKS))
def test_interpreted_steps_agree_with_the_reference(names: list[str]) -> None:
    found = run("triton_step_interpreted", *names, TRITON_INTERPRET="1")
    assert [*found] == names
    assert {name: error for name, (error,) in found.items() if not float(error) <= CHECKS[name]} == {}


@pytest.mark.parametrize(
    "capability", ["80", *(pytest.param(name, marks=pytest.mark.kernels) for name in ("89", "90"))]
)
def test_compiled_steps_hardly_spill_and_fit(capability: str, programs: Programs) -> None:
    cases, limit = COMPILED[capability]
    found = run("triton_offline", capability, *cases, start=programs.run, TRITON_INTERPRET="0")
    assert found.keys() == set(cases)
    for name, (_, spilled, shared) in found.items():
        assert int(spilled) <= SPILLED, name
        assert int(shared) <= limit, name


def test_tiles_fill_the_chip_where_there_are_rows() -> None:
    for rows, hidden, programs in ((1, 128, 16), (1, 5, 1), (4096, 128, 128), (4096, 32, 128), (16384, 256, 1024)):
        tile = tile_for_step(rows, hidden, 132)
        assert -(-rows // tile.rows) * -(-hidden // tile.units) == programs


def test_many_rows_of_wide_layers_are_left_to_products_in_tf32() -> None:
    assert pays(16_384, 128, "tf32")
    assert pays(4095, 256, "tf32")
    assert not pays(4096, 256, "tf32")
    assert not pays(4096, 129, "bf16")
    assert pays(16_384, 256, "ieee")


def test_the_operator_announces_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace with a fake GPU calls the kernel's operator."""
    monkeypatch.setattr(step_module, "_runs_kernels", lambda _: True)
    for cell, gates in ((LSTM, 4), (GRU, 3)):
        with FakeTensorMode(), torch.no_grad():
            w_ih, w_hh, x, state = (
                torch.empty(*shape, device="cuda") for shape in ((gates * 8, 5), (gates * 8, 8), (3, 5), (3, 1, 8))
            )
            states = (state, state)[: len(cell.state_names)]
            layers = [[LayerWeights(w_ih, w_hh)]]
            features, after = step_stack(cell, layers, x, states, options=Options(precision="tf32"))
        assert features.shape == (3, 8)
        assert [value.shape for value in after] == [(3, 1, 8)] * len(states)
        assert features.device.type == "cuda"
