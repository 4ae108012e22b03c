from __future__ import annotations

from itertools import product

import pytest
import torch

from recurl.core.errors import UnsupportedError
from recurl.recurrence import BACKENDS, GTrXLCell, Support
from recurl.recurrence.backend import OperatorSupport
from recurl.recurrence.cuda.attention import backend
from recurl.recurrence.cuda.attention.backend import TritonAttention
from tests.programs import Programs

from ..kernel_tests import FALLBACK, core_and_rest, run

pytestmark = pytest.mark.slow

CHECKS = {
    "float32": 2e-6,
    "float16": 4e-3,
    "bfloat16": 2e-2,
    "alone": 2e-6,
    "tiles": 2e-6,
    "sparse": 2e-6,
    "step": 2e-6,
    "isolation": 0,
    "overflow": 0,
    "wanted": 0,
    "strides": 2e-6,
}
CORE = "alone", "step", "strides"
LARGEST = 227 * 1024
COMPILED = {  # bytes spilled by each
    "forward,bfloat16,64,128,256,ieee": 48,
    "queries,bfloat16,64,128,256,ieee": 0,
    "keys,bfloat16,64,128,256,ieee": 496,  # of fewer registers: more programs at a time are faster
    "read,bfloat16,64,128,256,ieee": 136,
    "read_backward,bfloat16,64,128,256,ieee": 136,
    "step,bfloat16,64,128,256,ieee": 0,
    "forward,float32,64,128,256,tf32": 48,
    "queries,float32,64,128,256,tf32": 0,
    "keys,float32,64,128,256,tf32": 408,  # two warps are faster nevertheless
}
WIDEST = [
    f"{name},float32,128,100,512,{precision}"
    for name, precision in product(("forward", "queries", "keys", "read", "read_backward", "step"), ("tf32", "ieee"))
]


@pytest.mark.parametrize("names", core_and_rest(CORE, CHECKS))
def test_interpreted_kernels_are_exact(names: list[str]) -> None:
    found = run("attention.triton_interpreted", *names, TRITON_INTERPRET="1")
    assert [*found] == names
    assert {name: error for name, (error,) in found.items() if not float(error) <= CHECKS[name]} == {}


@pytest.mark.parametrize("cases", core_and_rest(["forward,bfloat16,64,128,256,ieee"], [*COMPILED, *WIDEST]))
def test_compiled_kernels_fit_and_spill_no_more_than_known(cases: list[str], programs: Programs) -> None:
    found = run("attention.triton_offline", "90", *cases, start=programs.run, TRITON_INTERPRET="0")
    assert [*found] == cases
    for name, (registers, spilled, shared, asynchronous) in found.items():
        assert int(asynchronous) == 0, f"{name}: ptxas before CUDA 13.3 compiles some wrongly"
        assert int(shared) <= LARGEST, name
        assert int(registers) > FALLBACK or int(spilled) == 0, name
        assert name in WIDEST or int(spilled) <= COMPILED[name], name


def test_unsupported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, cpu, gpu = TritonAttention("triton"), torch.device("cpu"), torch.device("cuda")
    assert "it needs an NVIDIA GPU, the tensors are on cpu" in (
        kernels.unsupported(OperatorSupport(cpu, torch.float32)) or ""
    )
    monkeypatch.setattr(backend, "refused_device", lambda device: None)
    for change, reason in (
        ({"dtype": torch.float64}, "got torch.float64; use 'loop'"),
        ({"keys": 129}, "at most 128 numbers, got 129; use 'loop' or more heads"),
        ({"values": 514}, "at most 513 numbers, got 514; use 'loop'"),
    ):
        support = OperatorSupport(gpu, torch.bfloat16, keys=64, values=257)._replace(**change)
        assert reason in (kernels.unsupported(support) or "")
    assert kernels.unsupported(OperatorSupport(gpu, torch.bfloat16, keys=64, values=257)) is None


def test_a_cell_that_attends_is_refused_before_it_runs() -> None:
    with pytest.raises(UnsupportedError, match="'triton' can't run this call: it needs"):
        BACKENDS.choose("triton", Support(GTrXLCell(), torch.device("cpu")))
