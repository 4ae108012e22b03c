"""Run the linear recurrence kernels in Triton's interpreter, with TRITON_INTERPRET=1 in the environment.

Prints one line per check: ``name: error``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl

from recurl.recurrence.cuda.linear import parts
from recurl.recurrence.cuda.linear.backend import TritonLinear
from recurl.recurrence.cuda.linear.config import Chunk
from recurl.recurrence.linear.kernels import LinearInputs

from ..interpreter import allow_bounds, patch_once
from ..kernel_tests import print_checks
from .problems import Problem, exact, problem, worst_error

allow_bounds()
patch_once()
NAMES = ("float64", "complex128", "float32", "complex64", "bfloat16")
KERNELS = TritonLinear(lambda *_: Chunk(8, 2, 8, group=2))  # small: several groups and blocks of channels


def solve(
    case: Problem, needs: tuple[bool, bool, bool] = (True, True, True), kernels: TritonLinear = KERNELS
) -> tuple[torch.Tensor, ...]:
    inputs = LinearInputs(*case.tensors, case.boundaries)
    h = kernels.forward(inputs)
    return h, *kernels.backward(inputs, h, case.grad, needs)


def error(case: Problem) -> float:
    wide = torch.complex128 if case.b.is_complex() else torch.float64
    found = solve(case)
    assert all(one.dtype == case.b.dtype for one in found)
    return worst_error(found, exact(case.to(wide)))


def isolation(dtype: torch.dtype) -> int:
    """Count changes outside a segment with NaN or infinity in it, or from states that aren't read."""
    case = problem((36,), (3,), dtype, rate=0.0)
    case.boundaries.starts[[10, 26]] = True
    case.a[[10, 26]] = 0.0
    clean, outside = solve(case), torch.ones(36, dtype=torch.bool)
    outside[10:26] = False
    states = torch.where(case.boundaries.starts[:, None], case.states, torch.nan)
    wrong = sum(
        not torch.equal(one, other) for one, other in zip(solve(replace(case, states=states)), clean, strict=True)
    )
    for poison, names in ((torch.nan, ("a", "states", "grad")), (torch.inf, ("b",))):
        for name in names:
            bad = getattr(case, name).clone()
            bad[10 if name == "states" else 20] = poison
            found = solve(replace(case, **{name: bad}))
            wrong += sum(not torch.equal(one[outside], other[outside]) for one, other in zip(found, clean, strict=True))
            wrong += all(one[~outside].isfinite().all() for one in found)
    for token in (10, 16):  # the first of the segment; the first of a piece, whose map must carry the NaN on
        a = case.a.clone()
        a[token] = torch.nan
        found = solve(replace(case, a=a))
        wrong += sum(not torch.equal(one[outside], other[outside]) for one, other in zip(found, clean, strict=True))
        wrong += not found[0][token:26].isnan().all()
    return int(wrong)


def wanted() -> int:
    """Check that unneeded gradients are None, and don't change the others."""
    wrong = 0
    for constant in (False, True):
        case = problem((9,), (3,), torch.float32, constant)
        every = solve(case)
        for k in range(3):
            _, *found = solve(case, (k == 0, k == 1, k == 2))
            wrong += [one is None for one in found] != [k != one for one in range(3)]
            wrong += not torch.equal(found[k], every[1 + k])
    return wrong


def strides() -> float:
    """Compare expanded, transposed and conjugate tensors."""
    case = problem((20,), (5,), torch.complex64)
    expanded = replace(case, b=case.b[:, :1].expand(20, 5), states=case.states[:1].expand(20, 5), grad=case.grad.conj())
    other = replace(case, a=case.a.t().contiguous().t().conj(), states=case.states.t().contiguous().t())
    return max(error(expanded), error(other))


def long() -> float:
    """Compare a recurrence over many chunks with a decay near one and without any start."""
    case = problem((1000,), (2,), torch.float32, rate=0.0, decay=(1 - 1e-5, 1 - 1e-6))
    wide = replace(case.to(torch.float64), boundaries=case.boundaries)
    return worst_error(solve(case, kernels=TritonLinear(lambda *_: Chunk(16, 16, 4, group=2))), exact(wide))


@triton.jit
def wait_kernel(p_words, q_words, to, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    at = row * COLUMNS + column[None, :]
    p, p_imag, q, q_imag = parts._await(
        p_words + at, q_words + at, 0, (row > 0) & (at > 0), at < COLUMNS, tl.float64, "real"
    )
    p, p_imag, q, q_imag = parts._compose(p, p_imag, q, q_imag, "real")
    tl.store(to + column, parts._pick(q, row, ROWS - 1))


def needless() -> float:
    """Check that no chunk waits for the state before a group if a segment starts after it: the first never comes."""
    p, q = torch.tensor([[[0.0, 0], [0.5, 0.5], [torch.nan, 2], [2, 2]], [[0, 10], [1, 1], [3, 3], [1, 1]]]).double()
    words = q.view(torch.int64).clone()
    words[0, 0] = parts.EMPTY
    found = torch.zeros(2, dtype=torch.float64)
    wait_kernel[(1,)](p.view(torch.int64), words, found, 4, 2)
    return (found - torch.tensor([7.0, 31.0])).abs().max().item()


def errors(name: str, constant: bool) -> float:
    dtype = getattr(torch, name)
    cases = [problem((3, 17), (3,), dtype, constant, 0.05)]
    if dtype.is_complex == (dtype.itemsize == 16):
        cases += [problem((40,), (9,), dtype, constant, 0.0), problem((12,), (2,), dtype, constant, 0.5)]
    return max(map(error, cases))


CHECKS = {
    **{f"{name} varying": partial(errors, name, False) for name in NAMES},
    **{f"{name} constant": partial(errors, name, True) for name in NAMES},
    "isolation": lambda: isolation(torch.float32) + isolation(torch.float64),
    "wanted": wanted,
    "strides": strides,
    "long": long,
    "needless": needless,
}

if __name__ == "__main__":
    print_checks(CHECKS)
