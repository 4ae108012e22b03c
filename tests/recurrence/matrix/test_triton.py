from __future__ import annotations

import pytest
import torch

from recurl.core.errors import ArgumentError
from recurl.recurrence.backend import OperatorSupport
from recurl.recurrence.cuda.matrix.backend import TritonMatrix
from recurl.recurrence.cuda.matrix.config import Sizes, plan_for, step_tile_for
from tests.programs import Programs

from ..kernel_tests import FALLBACK, core_and_rest, run

pytestmark = pytest.mark.slow

CHECKS = {
    **dict.fromkeys(("rows plain", "rows delta", "pieces plain", "pieces delta"), 1e-6),
    **dict.fromkeys(("sparse plain", "sparse delta"), 1e-6),
    **dict.fromkeys(("inference plain", "inference delta", "isolation plain", "isolation delta"), 0),
    **dict.fromkeys(("step plain", "step delta"), 3e-7),
    "expanded": 0,
    "repeated keys": 2e-6,
    "fast decay": 1e-5,
    "silent": 0,
    "planned": 2e-6,
    "bfloat16": 1.2e-2,
    "float16": 1e-3,
    "fuzz": 0,
}
CORE = "rows delta", "step delta"
COMPILED = {  # bytes spilled by each
    "forward,bfloat16,plain,64,64": 216,  # of two warps: faster than four, which spill nothing
    "forward,bfloat16,delta,64,64": 0,
    "backward,bfloat16,plain,64,64": 296,
    "backward,bfloat16,delta,64,64": 456,
    "forward,float32,delta_resets,64,64": 448,
    "backward,float32,delta_resets,64,64": 1264,
    "maps,bfloat16,delta,64,64": 0,
    "gradient_maps,bfloat16,delta,64,64": 40,
    "carry,bfloat16,delta,64,64": 0,
    "carry,float32,delta,128,128": 0,
    "solve,bfloat16,delta,64,64": 0,
    "solve,float32,delta,256,256": 264,
    "backward,float16,plain,128,128": 352,
    "backward,bfloat16,delta,256,256": 776,
    "forward,float32,delta_resets,256,64": 5512,
    "backward,float32,delta_resets,256,64": 3456,
    "step,float32,delta_resets,64,64": 0,
    "step,bfloat16,plain,256,16": 0,
}
WIDEST = "forward,float32,delta_resets,256,64", "backward,float32,delta_resets,256,64"


@pytest.mark.parametrize("names", core_and_rest(CORE, CHECKS))
def test_interpreted_kernels_are_exact(names: list[str]) -> None:
    found = run("matrix.triton_interpreted", *names, TRITON_INTERPRET="1")
    assert [*found] == names
    assert {name: error for name, (error,) in found.items() if not float(error) <= CHECKS[name]} == {}


@pytest.mark.parametrize("cases", core_and_rest(["step,float32,delta_resets,64,64"], COMPILED))
def test_compiled_kernels_fit_and_spill_no_more_than_known(cases: list[str], programs: Programs) -> None:
    found = run("matrix.triton_offline", "90", *cases, start=programs.run, TRITON_INTERPRET="0")
    assert [*found] == cases
    for name, (registers, spilled, shared, asynchronous) in found.items():
        assert int(asynchronous) == 0, f"{name}: ptxas before CUDA 13.3 compiles some wrongly"
        assert int(spilled) <= COMPILED[name], name
        assert int(shared) <= (99 if name not in WIDEST else 227) * 1024, name  # of the smallest chips
        assert int(registers) > FALLBACK or int(spilled) == 0, name


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("length", [1, 16, 50, 128, 4096, 32_768])
def test_plans_cut_long_rows_alone(length: int, delta: bool) -> None:
    for keys in (1, 16, 64, 128, 256):
        for bits in (16, 32):
            plan = plan_for(Sizes(32_768 // length, length, 4, keys, keys, bits, delta, 132))
            assert plan.chunk in (16, 32, 64)
            pieces = -(-length // (plan.chunk * plan.piece))
            assert pieces == 1 or length >= 512
            for tile in (plan.maps, plan.forward, plan.backward, plan.carry, plan.solve):
                assert tile.columns >= 16
                assert tile.columns & (tile.columns - 1) == 0


@pytest.mark.parametrize("rows", [1, 16, 63, 64, 256])
def test_forms_are_cut_for_the_same_rows(rows: int) -> None:
    plans = [plan_for(Sizes(rows, 512, 4, 64, 64, 16, delta, 132)) for delta in (False, True)]
    assert [plan.piece < 512 // plan.chunk for plan in plans] == [rows < 33] * 2


def test_few_rows_step_in_narrow_parts() -> None:
    assert step_tile_for(1, 4, 64, 64, 132).columns < step_tile_for(16_384, 4, 64, 64, 132).columns


def test_unsupported_says_why() -> None:
    support, kernels = OperatorSupport(torch.device("cpu"), torch.float32), TritonMatrix()
    assert "it needs an NVIDIA GPU, the tensors are on cpu" in (kernels.unsupported(support) or "")
    assert "got torch.float64; use 'chunked' or 'loop'" in (
        kernels.unsupported(support._replace(dtype=torch.float64)) or ""
    )
    assert "at most 256 numbers, got 300 and 16" in (kernels.unsupported(support._replace(keys=300, values=16)) or "")


@pytest.mark.parametrize("states", [None, torch.zeros(1).expand(2, 1, 3, 3)])
def test_states_that_cant_be_overwritten_are_refused(states: torch.Tensor | None) -> None:
    x, scalars = torch.zeros(2, 1, 3), torch.zeros(2, 1)
    with pytest.raises(ArgumentError, match=r"each row and head with a contiguous matrix of its own; got"):
        TritonMatrix().step(x, x, x, scalars, scalars, states, in_place=True)
