"""Implementations and cells are imported when they are used, their operators exist from the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from recurl.modules import GRUModule, MinGRUModule, set_recurrent_mode

pytestmark = pytest.mark.slow


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_not_used_is_not_imported() -> None:
    run("""
import sys
import torch
from recurl.recurrence import BACKENDS, CELLS, LSTM, Support

parts = "pad loop scan reference experiment kernel_backend segments linear triton"
parts += " cells.minimal cells.lru cells.ffm cells.gtrxl cells.mlstm cells.slstm cells.shm matrix"
unused = {f"recurl.recurrence.{part}" for part in parts.split()}
assert not unused & set(sys.modules), unused & set(sys.modules)
assert CELLS["lru"].name == "lru" and [cell.name for cell in CELLS.values()] == list(CELLS)
assert [type(BACKENDS.named(name)).__name__ for name in BACKENDS.names[2:]] == [
    "PadBackend", "AutogradBackend", "KernelBackend", "KernelBackend", "ScanBackend", "ReferenceBackend"
]
assert not any(name.startswith("recurl.recurrence.cuda.") and name.endswith("launch") for name in sys.modules)
""")


def test_fastest_on_a_cpu_imports_nothing_for_a_gpu() -> None:
    run("""
import sys
import torch
from recurl.recurrence import BACKENDS, CELLS, Boundaries, Support, linear_recurrence

for cell in CELLS.values():
    BACKENDS.choose("fastest", Support(cell, torch.device("cpu")))
linear_recurrence(torch.ones(2), torch.ones(3, 2), torch.ones(3, 2), Boundaries.of_rows((1, 3)))
assert not any(name.startswith("recurl.recurrence.cuda") for name in sys.modules)
""")


def test_names_of_built_in_cells_are_taken_before_these_are_imported() -> None:
    run("""
from recurl.core.errors import ArgumentError
from recurl.recurrence import Cell

try:
    class Own(Cell, name="ffm"):
        pass
except ArgumentError as error:
    assert "There is a cell called 'ffm', recurl.recurrence.cells.ffm:FFMCell" in str(error)
else:
    raise AssertionError
""")


@pytest.mark.parametrize("make", [GRUModule, MinGRUModule])
def test_an_exported_program_runs_in_a_process_that_imports_only_recurrence(make: type, tmp_path: Path) -> None:
    module = make(3, 5, in_key="x", out_key="y", recurrent_backend="loop")
    batch = TensorDict({"x": torch.randn(2, 4, 3), "is_init": torch.rand(2, 4, 1) < 0.3}, (2, 4))
    batch[module.state_keys[0]] = torch.randn(2, 4, 1, 5)
    inputs = tuple(batch[key] for key in module.in_keys)
    with set_recurrent_mode(True):
        torch.export.save(torch.export.export(module, inputs), tmp_path / "program.pt2")
        torch.save((inputs, module(*inputs)[0]), tmp_path / "expected.pt")
    run(f"""
import torch
import recurl.recurrence

program = torch.export.load({str(tmp_path / "program.pt2")!r})
assert "recurl." in str(program.graph)
inputs, expected = torch.load({str(tmp_path / "expected.pt")!r})
torch.testing.assert_close(program.module()(*inputs)[0], expected)
""")
