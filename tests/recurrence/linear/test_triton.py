from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from recurl.errors import UnsupportedError
from recurl.recurrence.linear.registry import LINEAR
from recurl.recurrence.triton.linear import TritonLinear
from recurl.recurrence.triton.linear_config import chunk_for

from ..test_triton import ROOT, run

pytestmark = pytest.mark.slow

FORMS = ("varying", "constant")
LIMITS = {"float64": 1e-12, "complex128": 1e-12, "float32": 2e-7, "complex64": 2e-7, "bfloat16": 8e-3}
CHECKS = {f"{name} {form}": limit for name, limit in LIMITS.items() for form in FORMS}
CHECKS |= {"isolation": 0, "wanted": 0, "strides": 2e-7, "long": 1e-6}
SPILLED = 128  # bytes, of which one kernel at most has so many
COMPILED = [
    "forward,float32,varying,256",
    "backward,float32,varying,256",
    "forward,float32,constant,256",
    "backward,complex64,constant,256",
    "backward,complex64,varying,250",
    "forward,bfloat16,varying,20",
]


def test_interpreted_kernels_are_exact() -> None:
    found = run("linear.triton_interpreted", TRITON_INTERPRET="1")
    assert found.keys() == CHECKS.keys()
    assert {name: float(found[name][0]) for name, limit in CHECKS.items() if not float(found[name][0]) <= limit} == {}


def test_compiled_kernels_hardly_spill() -> None:
    found = run("linear.triton_offline", "90", *COMPILED, TRITON_INTERPRET="0")
    assert found.keys() == set(COMPILED)
    for name, (_, spilled, shared) in found.items():
        assert int(spilled) <= SPILLED, name
        assert int(shared) <= 16 * 1024, name


def test_programs_are_full() -> None:
    """Each thread has at least a vector of 16 bytes of float32 in each step."""
    for width in (1, 3, 20, 64, 256, 1000):
        for dtype in (torch.float32, torch.complex64):
            for direction in ("forward", "backward"):
                chunk = chunk_for(direction, width, dtype, False)
                assert chunk.rows * chunk.columns == 32 * chunk.warps * 4


def test_unsupported_says_why() -> None:
    cpu = torch.device("cpu")
    assert "it needs an NVIDIA GPU, the tensors are on cpu" in (TritonLinear().unsupported(cpu, torch.float32) or "")
    with pytest.raises(UnsupportedError, match=r"'triton' can't run this linear recurrence: it needs"):
        LINEAR.choose("triton", cpu, torch.float32)


def test_importing_recurl_loads_no_kernels() -> None:
    code = "import sys, recurl.recurrence; sys.exit('recurl.recurrence.triton.linear_launch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
