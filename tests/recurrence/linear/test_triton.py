from __future__ import annotations

import pytest
import torch

from recurl.core.errors import UnsupportedError
from recurl.recurrence.backend import OperatorSupport
from recurl.recurrence.built_in import LINEAR
from recurl.recurrence.cuda.linear.backend import TritonLinear
from recurl.recurrence.cuda.linear.config import chunk_for
from tests.programs import Programs

from ..kernel_tests import core_and_rest, run

pytestmark = pytest.mark.slow

CHECKS = {
    "float64 constant": 1e-12,
    "complex128 varying": 1e-12,
    "float32 varying": 2e-7,
    "float32 constant": 2e-7,
    "complex64 constant": 2e-7,
    "bfloat16 varying": 8e-3,  # strides: complex64 that varies
    "bfloat16 constant": 1.2e-2,  # the interpreter truncates both h and the sum, where a GPU rounds
    "isolation": 0,
    "wanted": 0,
    "strides": 2e-7,
    "long": 1e-6,
    "needless": 0,
}
CORE = "float32 varying", "complex64 constant", "needless"
COMPILED = {  # bytes spilled by each
    "forward,float32,varying,256": 0,
    "backward,float32,varying,256": 16,
    "forward,float32,constant,256": 0,
    "backward,float32,constant,256": 0,
    "backward,complex64,varying,256": 88,
    "backward,complex64,constant,250": 0,
    "backward,bfloat16,varying,256": 0,
    "forward,complex64,varying,256": 0,
    "forward,bfloat16,varying,20": 0,
}


@pytest.mark.parametrize("names", core_and_rest(CORE, CHECKS))
def test_interpreted_kernels_are_exact(names: list[str]) -> None:
    found = run("linear.triton_interpreted", *names, TRITON_INTERPRET="1")
    assert [*found] == names
    assert {name: error for name, (error,) in found.items() if not float(error) <= CHECKS[name]} == {}


@pytest.mark.parametrize("cases", core_and_rest(["forward,float32,constant,256"], COMPILED))
def test_compiled_kernels_spill_no_more_than_known_and_exchange_little(cases: list[str], programs: Programs) -> None:
    """Hundreds of barriers would show that the compiler moves a thread's values to other threads.

    Forward passes load a piece at once: 16 tokens of b, and of a where it varies. Left alone, the compiler moves each
    load down to its use, and a thread waits for memory at every token.
    """
    found = run("linear.triton_offline", "90", *cases, start=programs.run, TRITON_INTERPRET="0")
    assert [*found] == cases
    for name, (_, spilled, shared, barriers, loads) in found.items():
        assert int(spilled) <= COMPILED[name], name
        assert int(shared) <= 4 * 1024, name
        assert int(barriers) <= 24, name
        if name.startswith("forward"):
            assert int(loads) >= (16 if "constant" in name else 32), name


def test_programs_are_full() -> None:
    """Each of 128 threads has 8 bytes of each token's number in registers."""
    for width in (1, 3, 20, 64, 256, 1000):
        for dtype in (torch.bfloat16, torch.float32, torch.complex64, torch.complex128):
            for direction in ("forward", "backward"):
                chunk = chunk_for(direction, width, dtype)
                assert chunk.rows * chunk.columns * max(4, dtype.itemsize) == 128 * 8


def test_unsupported_says_why() -> None:
    cpu = torch.device("cpu")
    support = OperatorSupport(cpu, torch.float32)
    assert "it needs an NVIDIA GPU, the tensors are on cpu" in (TritonLinear().unsupported(support) or "")
    with pytest.raises(UnsupportedError, match=r"'triton' can't run this linear recurrence: it needs"):
        LINEAR.choose("triton", support)
