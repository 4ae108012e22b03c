from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from recurl.recurrence import GRU, LSTM, Options, Support
from recurl.recurrence.triton import TritonKernels
from recurl.recurrence.triton import backend as backend_module
from recurl.recurrence.triton.config import resident_for, tile_for
from recurl.recurrence.triton.layout import Layout

ROOT = Path(__file__).parents[2]
ERRORS = {"ieee": 2e-6, "recompute": 2e-6, "layers": 2e-6, "group": 2e-6, "tf32x3": 5e-6, "tf32": 2e-3, "saved": 0}
CHECKS = {f"{cell} {name}": limit for cell in ("lstm", "gru") for name, limit in ERRORS.items()} | {
    "bounds": 0,
    "sums": 1e-6,
    "lstm projection": 2e-6,
    "lstm projection recompute": 2e-6,
    "lstm projection saved": 0,
}
# Kind, kernel, cell, hidden size and precision.
PLAIN = [
    "plain,forward,lstm,64,tf32",
    "plain,backward,lstm,64,tf32",
    "plain,backward,gru,100,tf32x3",
    "plain,forward,lstm,128,bf16",
    "plain,forward,gru,96,ieee",
    "plain,backward,lstm,256,bf16",
    "plain,backward,gru,1024,tf32",
    "pointwise,bounds,lstm,64,ieee",
    "pointwise,previous,lstm,60,ieee",
    "pointwise,gates,gru,60,tf32",
    "pointwise,sums,gru,60,tf32",
]
RESIDENT = [
    f"resident,{direction},{cell},{hidden},{precision}"
    for direction in ("forward", "backward")
    for cell in ("lstm", "gru")
    for hidden, precision in ((20, "tf32"), (64, "tf32"), (128, "tf32"), (100, "bf16"), (256, "tf32"), (200, "bf16"))
]
COMPILED = {"80": (PLAIN, 163 * 1024), "90": ([*PLAIN, *RESIDENT], 227 * 1024)}


def run(module: str, *arguments: str, **environment: str) -> dict[str, list[str]]:
    """The lines that a module prints, by all words but the last few numbers."""
    command = [sys.executable, "-m", f"tests.recurrence.{module}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return {line.split(":")[0]: line.split(":")[1].split() for line in done.stdout.splitlines()}


@cache
def interpreted() -> dict[str, list[str]]:
    return run("triton_interpreted", TRITON_INTERPRET="1")


@pytest.mark.parametrize(("name", "limit"), CHECKS.items())
def test_interpreted_kernels_agree_with_the_reference(name: str, limit: float) -> None:
    assert float(interpreted()[name][0]) <= limit


def test_every_interpreted_check_has_a_limit() -> None:
    assert interpreted().keys() == CHECKS.keys()


@pytest.mark.parametrize("capability", COMPILED)
def test_compiled_kernels_spill_nothing_and_fit(capability: str) -> None:
    cases, limit = COMPILED[capability]
    found = run("triton_offline", capability, *cases, TRITON_INTERPRET="0")
    assert found.keys() == set(cases)
    for name, (_, spilled, shared) in found.items():
        assert int(spilled) == 0, name
        assert int(shared) <= limit, name


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_group_holds_all_units(direction: str) -> None:
    for hidden in (1, 16, 17, 64, 100, 128, 300, 1024, 3000):
        for gates in (3, 4):
            for precision in ("ieee", "tf32", "tf32x3", "bf16"):
                tile = tile_for(direction, hidden, gates, precision)
                assert tile.units * tile.members >= hidden
                assert tile.block_k >= hidden or not tile.resident


def test_resident_kernels_serve_what_was_measured() -> None:
    assert resident_for((9, 0), "lstm", 100, "tf32") is not None
    for capability, hidden, precision in (((8, 0), 64, "tf32"), ((9, 0), 513, "tf32"), ((9, 0), 64, "ieee")):
        assert resident_for(capability, "lstm", hidden, precision) is None


@pytest.mark.parametrize("lstm", [True, False])
@pytest.mark.parametrize(("width", "interleaved"), [(5, False), (5, True), (16, True)])
def test_layout_restores_what_it_arranged(lstm: bool, width: int, interleaved: bool) -> None:
    layout = Layout(lstm, 5, width, interleaved)
    rows = torch.randn(layout.num_gates * 5, 3)
    arranged = layout.arrange(rows)
    assert arranged.shape == (layout.num_gates * width, 3)
    assert torch.equal(layout.restore_input(arranged), rows)
    hidden_part = arranged if lstm else arranged.roll(-width, 0)
    assert torch.equal(layout.restore_hidden(hidden_part), rows)
    assert torch.isclose(arranged.abs().sum(), rows.abs().sum())
    unit = arranged.view(width, 4, 3)[3] if lstm and interleaved else None
    if unit is not None:
        assert torch.equal(unit, rows.view(4, 5, 3)[:, 3])


def test_unsupported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = TritonKernels()
    cuda = torch.device("cuda", 0)
    assert "it needs an NVIDIA GPU, the tensors are on cpu" in (
        kernels.unsupported(Support(LSTM, torch.device("cpu"))) or ""
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "this GPU has 7.5" in (kernels.unsupported(Support(LSTM, cuda)) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert "got torch.float64" in (kernels.unsupported(Support(GRU, cuda, torch.float64)) or "")

    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert "hidden_size=16384 is too large" in (kernels.unsupported(Support(LSTM, cuda, hidden_size=16384)) or "")
    assert kernels.unsupported(Support(LSTM, cuda, hidden_size=1024, options=Options(True, "tf32"))) is None


def test_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonKernels()
    backend_module._missing.cache_clear()
    monkeypatch.setattr("importlib.metadata.version", lambda _: "3.1.0")
    assert "it needs triton 3.6 or newer, found 3.1.0" in (backend.missing() or "")
    backend_module._missing.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install 'recurl[triton]'" in (backend.missing() or "")
    assert "pip install 'recurl[triton]'" in (backend.unsupported(Support(LSTM, torch.device("cuda", 0))) or "")
    backend_module._missing.cache_clear()


def test_importing_recurl_loads_no_kernels() -> None:
    code = "import sys, recurl.recurrence.triton; sys.exit('recurl.recurrence.triton.launch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
