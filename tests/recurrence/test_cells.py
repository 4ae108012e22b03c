"""Contract of cells, and the backends that support each of them."""

from __future__ import annotations

import pickle
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError, UnsupportedError
from recurl.modules import CellModule, set_recurrent_mode
from recurl.recurrence import (
    BACKENDS,
    CELLS,
    GRU,
    LSTM,
    Cell,
    LayerCall,
    Sizes,
    States,
    Support,
    cell_of,
    load_cell,
    register_backend,
    step_stack,
)
from recurl.recurrence.cells import cell_named
from tests.own_cells import FastWeights, FourGates, MinGRU

CPU = torch.device("cpu")


def test_a_name_tells_a_cell_from_all_others() -> None:
    assert (LSTM.name, GRU.name, MinGRU().name) == ("lstm", "gru", "examples.mingru:MinGRU")
    assert FastWeights(keys=4).name == "tests.own_cells:FastWeights(keys=4)"
    assert pickle.loads(pickle.dumps(FastWeights(keys=4))).name == FastWeights(keys=4).name
    assert cell_named("examples.mingru:MinGRU").name == MinGRU().name
    with pytest.raises(
        ArgumentError, match=r"'nowhere:None' isn't known in this process: before running .* import its module"
    ):
        cell_named("nowhere:None")


def test_a_name_can_be_taken_once() -> None:
    with pytest.raises(ArgumentError, match=r"There is a cell called 'lstm', recurl\.recurrence\.cells\.lstm:LSTMCell"):

        class Impostor(Cell, name="lstm"):
            pass


class Scaled(Cell):
    """A sum scaled by a table whose text form is too long to identify it."""

    def __init__(self, table: np.ndarray | None = None) -> None:
        self.table = np.ones(1) if table is None else table

    def parameters(self, sizes):
        return {"weight": (sizes.hidden_size, sizes.input_size)}

    def step(self, x, states, weight):
        h = states[0] + float(self.table.mean()) * x @ weight.t()
        return h, (h,)


def defined_again(factor: float) -> Cell:
    """Return a cell whose class has the same path on every call, as in a notebook."""

    class Again(Scaled):
        def step(self, x, states, weight):
            return super().step(factor * x, states, weight)

    return Again()


@dataclass(frozen=True, slots=True)
class Slotted(Cell):
    """A cell whose options aren't in its __dict__."""

    factor: float = 1.0

    parameters = Scaled.parameters

    def step(self, x, states, weight):
        h = states[0] + self.factor * x @ weight.t()
        return h, (h,)


def table(factor: float) -> np.ndarray:
    return np.pad(np.full(2000, factor), 5)


@pytest.mark.parametrize(
    "cells",
    [
        (defined_again(1.0), defined_again(100.0)),
        (Scaled(table(1.0)), Scaled(table(100.0))),
        (Slotted(), Slotted(100.0)),
    ],
    ids=["defined again", "large options", "slots"],
)
def test_cells_that_look_alike_are_not_taken_for_each_other(cells: tuple[Cell, Cell]) -> None:
    """Operators refer to a cell by its name, under vmap, tracing and export."""
    assert cells[0].name != cells[1].name
    torch.manual_seed(0)
    batch = TensorDict({"x": torch.randn(2, 4, 3), "is_init": torch.zeros(2, 4, dtype=torch.bool)}, [2, 4])
    modules = [CellModule(cell, 3, 5, in_key="x", out_key="y", recurrent_backend="loop") for cell in cells]
    for module in modules:

        def features(parameters: dict[str, Tensor], module: CellModule = module) -> Tensor:
            with set_recurrent_mode(True):
                return functional_call(module, parameters, (batch.copy(),))["y"]

        parameters = {name: value.detach().unsqueeze(0) for name, value in module.named_parameters()}
        with set_recurrent_mode(True):
            expected = module(batch.copy())["y"]
        torch.testing.assert_close(vmap(features)(parameters)[0], expected)


def test_a_step_of_ones_own_inherits_no_shortcut() -> None:
    class Clipped(type(LSTM)):
        def step(self, x, states, weight_ih, weight_hh, bias_ih=None, bias_hh=None, weight_hr=None):
            h, (_, c) = super().step(x, states, weight_ih, weight_hh, bias_ih, bias_hh, weight_hr)
            return h, (h, c.clamp(-1, 1))

    clipped = Clipped()
    assert (clipped.derivatives, clipped.loop, clipped.features_are_first_state) == (None, None, False)
    assert clipped.name != "lstm"
    for backend in ("cpu", "triton", "pad"):
        with pytest.raises(UnsupportedError, match=r"kernels for lstm.* gru.* only.*Clipped.*use 'auto' or 'loop'"):
            BACKENDS.check_cell(backend, clipped)


@pytest.mark.parametrize("backend", ["pad", "cpu", "triton"])
def test_four_gates_are_not_taken_for_an_lstm(backend: str) -> None:
    reason = rf"'{backend}' can't run this call: it has kernels for lstm.* gru.* only.*tests\.own_cells:FourGates; use"
    if BACKENDS.named(backend).missing():
        reason = f"'{backend}' is not installed"
    with pytest.raises((UnsupportedError, MissingDependencyError), match=reason):
        BACKENDS.choose(backend, Support(FourGates(), CPU))


def test_automatic_choices_serve_the_cell() -> None:
    own = Support(FourGates(), CPU)
    assert (BACKENDS.choose("auto", own).name, BACKENDS.choose("fastest", own).name) == ("loop", "loop")
    assert BACKENDS.choose("auto", Support(FourGates(), CPU, compiling=True)).name == "scan"
    assert BACKENDS.choose("fastest", Support(GRU, CPU)).name == "cpu"


def test_the_quick_step_is_for_the_cells_it_serves() -> None:
    """Without gradients the library steps an LSTM, but not a different cell with the same shapes."""
    torch.manual_seed(0)
    weights, x = (torch.randn(20, 3), torch.randn(20, 5)), torch.randn(4, 3)
    states = (torch.randn(4, 1, 5), torch.randn(4, 1, 5))
    with torch.no_grad():
        features, _ = step_stack(FourGates(), [[weights]], x, states)
    expected, _ = FourGates().step(x, tuple(state[:, 0] for state in states), *weights)
    torch.testing.assert_close(features, expected)


def test_zeros_need_shapes() -> None:
    with pytest.raises(ArgumentError, match=r"states=None means zeros of the shapes in shapes=, which is empty"):
        step_stack(MinGRU(), [[(torch.zeros(2, 2), torch.zeros(2, 2))]], torch.zeros(1, 2), None)


class Recorder:
    """A backend that supports only minGRU, based on the reference."""

    name, cells = "recorder", ("examples.mingru:MinGRU",)

    def missing(self) -> None:
        return None

    def unsupported(self, support: Support) -> str | None:
        return "it computes in float32" if support.dtype != torch.float32 else None

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        return BACKENDS.choose("reference", Support(call.cell, call.x.device)).run(call)


def test_a_backend_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS, "_backends", dict(BACKENDS._backends))
    monkeypatch.setattr(BACKENDS, "_fast", list(BACKENDS._fast))
    register_backend(Recorder(), fast=True)
    assert BACKENDS.choose("recorder", Support(MinGRU(), CPU)).name == "recorder"
    assert BACKENDS.choose("fastest", Support(MinGRU(), CPU)).name == "recorder"
    assert BACKENDS.choose("fastest", Support(MinGRU(), CPU, torch.float64)).name == "loop"
    assert BACKENDS.choose("fastest", Support(LSTM, CPU)).name == "cpu"
    with pytest.raises(
        UnsupportedError, match=r"'recorder' can't run this call: it has kernels for examples.*for .* lstm;"
    ):
        BACKENDS.choose("recorder", Support(LSTM, CPU))


def test_a_backend_lacks_nothing() -> None:
    with pytest.raises(ArgumentTypeError, match="SimpleNamespace lacks cells, missing, unsupported, run"):
        register_backend(types.SimpleNamespace(name="empty"))


class Unfinished(Cell):
    def parameters(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {}


class NeedsSize(MinGRU):
    def __init__(self, width: int) -> None:
        self.width = width


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.nn.GRUCell, r"must be a subclass of recurl\.recurrence\.Cell.*which has no step"),
        (3, "got 3, which has no parameters and no step"),
        (Unfinished, "The cell Unfinished must define step"),
        (NeedsSize, "The cell NeedsSize needs arguments .*width.*pass an instance"),
    ],
)
def test_what_is_no_cell(value: object, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        cell_of(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "lstn",
            r"There is no cell 'lstn'\. Did you mean lstm\? Cells are lstm, gru, mingru, minlstm, lru, s5, rglru, "
            "ffm, gtrxl, mlstm, mamba2, gated_deltanet, slstm, shm, or module:Class",
        ),
        ("minGRU", r"There is no cell 'minGRU'\. Did you mean mingru\?"),
        ("s55(norm=False)", r"There is no cell 's55'\. Did you mean s5\?"),
        ("s5(size=3)", r"The options of 's5\(size=3\)' don't fit .*; s5 takes state_size, norm, min_step, max_step"),
        ("s5(64)", r"The options of a cell must be numbers, strings or None by name, .* as in .*; got 's5\(64\)'"),
        ("gtrxl(window=8)(heads=2)", r"by name, each given once, as in .*; got 'gtrxl\(window=8\)\(heads=2\)'"),
        ("gtrxl(window=8, window=4)", r"by name, each given once, as in .*; got 'gtrxl\(window=8, window=4\)'"),
        ("s5(norm=len)", "The options of a cell must be numbers"),
        ("s5(norm=True", "The options of a cell must be numbers"),
        ("no_such_module:Cell", "The module 'no_such_module' of the cell .* can't be imported.*PYTHONPATH"),
        ("..:Cell", "The module '..' of the cell .* can't be imported"),
        ("examples.mingru:MinGru", r"The module 'examples\.mingru' has no cell 'MinGru'\. Did you mean MinGRU\?"),
        ("tests.own_cells:torch", r"'tests\.own_cells:torch' is not a cell\. A cell must be a subclass"),
        (f"{__name__}:Unfinished", "is not a cell. The cell Unfinished must define step"),
    ],
)
def test_names_of_no_cell(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load_cell(text)


def test_cells_by_name() -> None:
    assert [load_cell(name).name for name in CELLS] == list(CELLS)
    assert isinstance(load_cell("examples.mingru:MinGRU"), MinGRU)
    assert load_cell("tests.own_cells:FastWeights(keys=4)").keys == 4
    assert load_cell("s5(state_size=64, norm=False)").name == "s5(state_size=64, norm=False)"
    assert load_cell("s5(min_step=0.001)") == CELLS["s5"]
    assert load_cell("s5(min_step=0.001)").name == "s5"


@pytest.mark.parametrize("name", CELLS)
def test_a_step_copies_nothing_to_a_device(name: str) -> None:
    """Tensors made from Python numbers are copied to the device, which a CUDA graph can't capture."""
    module = CellModule(cell_named(name), 3, 8, in_key="observation", out_key="features")

    def features(observation: Tensor, is_init: Tensor) -> Tensor:
        return module(TensorDict({"observation": observation, "is_init": is_init}, [2]))["features"]

    given = torch.randn(2, 3), torch.zeros(2, 1, dtype=torch.bool)
    graph = make_fx(features, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    assert not [node for node in graph.graph.nodes if "lift_fresh" in str(node.target)]
