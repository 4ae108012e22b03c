"""C++ kernels of linear recurrences, with every instruction set and several thread counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recurl.core.errors import UnsupportedError
from recurl.recurrence import Boundaries, linear_recurrence, record_backends
from recurl.recurrence.backend import OperatorSupport
from recurl.recurrence.built_in import LINEAR
from recurl.recurrence.cpu import instruction_sets
from recurl.recurrence.cpu.linear import CpuLinear
from recurl.recurrence.linear.kernels import LinearInputs

from .problems import DTYPES, Problem, exact, problem, worst_error

NEEDS = (True, True, True)
PROBLEMS = [
    *(pytest.param(*case, marks=pytest.mark.full) for case in ((False, 0.0), (False, 0.02))),
    (True, 1e-4),
]


def solve(case: Problem, kernels: CpuLinear) -> tuple[torch.Tensor, ...]:
    """Return h and all gradients, computed directly by the kernels."""
    inputs = LinearInputs(*case.tensors, case.boundaries)
    h = kernels.forward(inputs)
    return h, *kernels.backward(inputs, h, case.grad, NEEDS)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", instruction_sets())
def test_exact_for_any_number_of_channels(isa, dtype, constant):
    for width in (1, 2, 3, 7, 8, 9, 16, 31, 100):
        case = problem((3, 20), (width,), dtype, constant, seed=width)
        assert worst_error(solve(case, CpuLinear(isa)), exact(case)) <= 1e-12


@pytest.mark.parametrize("isa", instruction_sets())
@settings(deadline=None, max_examples=25)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 40), st.booleans(), st.booleans())
def test_any_boundaries(isa, starts, width, constant, imaginary):
    case = problem((len(starts),), (width,), DTYPES[imaginary], constant)
    case = replace(case, boundaries=Boundaries.from_is_init(torch.tensor(starts)))
    assert worst_error(solve(case, CpuLinear(isa)), exact(case)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("constant", "rate"), PROBLEMS)
def test_same_bits_for_any_number_of_threads(constant, rate):
    """Large enough for several threads: one, few or many segments, odd channel counts, and rows larger than a page."""
    sizes = ((40_000, 200, torch.float32), (40_000, 37, torch.complex64), (40_000, 3, torch.float32))
    for tokens, width, dtype in (*sizes, (2_000, 2_100, torch.float32)):
        case = problem((tokens,), (width,), dtype, constant, rate)
        for isa in instruction_sets():
            torch.set_num_threads(1)
            alone = solve(case, CpuLinear(isa))
            for threads in (2, 3):
                torch.set_num_threads(threads)
                for one, same in zip(alone, solve(case, CpuLinear(isa)), strict=True):
                    assert torch.equal(one, same), (isa, threads)


def test_permuting_segments_permutes_bits():
    case = problem((300,), (9,), torch.float32)
    segments = case.boundaries.split(torch.arange(300))
    order = torch.cat([segments[k] for k in torch.randperm(len(segments)).tolist()])
    permuted = Problem(
        *(one[order] for one in case.tensors), Boundaries(case.boundaries.starts[order], (300,)), case.grad[order]
    )
    for one, other in zip(solve(case, CpuLinear()), solve(permuted, CpuLinear()), strict=True):
        assert torch.equal(one[order], other)


def test_fastest_on_a_cpu():
    with record_backends() as ran:
        linear_recurrence(*problem().tensors, problem().boundaries)
    assert ran == ["cpu"]


def test_other_devices_are_refused():
    with pytest.raises(UnsupportedError, match=r"'cpu' can't run this linear recurrence: .*on the CPU.*cuda.*'loop'"):
        LINEAR.choose("cpu", OperatorSupport(torch.device("cuda"), torch.float32))


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("isa", instruction_sets())
def test_bfloat16_is_float32_rounded(isa, constant):
    """bfloat16 without a float32 copy, including non-finite numbers and odd widths."""
    for width in (1, 5, 8, 37):
        case = problem((3, 20), (width,), torch.float64, constant, seed=width)
        a, b, states = (tensor.bfloat16() for tensor in case.tensors)
        b[7, 0], b[23, 0], b[47, 0] = torch.nan, torch.inf, 3e38
        grad, kernels = case.grad.bfloat16(), CpuLinear(isa)
        narrow, wide = (
            LinearInputs(*(x.to(t) for x in (a, b, states)), case.boundaries) for t in (a.dtype, torch.float32)
        )
        h = kernels.forward(narrow)
        found = h, *kernels.backward(narrow, h, grad, NEEDS)
        expected = kernels.forward(wide), *kernels.backward(wide, h.float(), grad.float(), NEEDS)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other.bfloat16(), rtol=0, atol=0, equal_nan=True)
