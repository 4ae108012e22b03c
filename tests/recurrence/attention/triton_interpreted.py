"""Run the attention kernels in Triton's interpreter, with TRITON_INTERPRET=1 in the environment.

Prints one line per check: ``name: error``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from recurl.core.relative_error import relative_error
from recurl.recurrence.attention.kernels import AttentionInputs
from recurl.recurrence.cells import ONE_STEP
from recurl.recurrence.cells.attention import Attention
from recurl.recurrence.cuda.attention.backend import TritonAttention
from recurl.recurrence.cuda.attention.config import Tiles
from recurl.recurrence.cuda.attention.launch import run_step

from ..interpreter import allow_bfloat16, allow_bounds, patch_once
from ..kernel_tests import print_checks
from .problems import NAMES, Problem, exact, problem, worst_error
from .test_operator import check_isolation, check_overflow

allow_bounds()
patch_once()
allow_bfloat16()
KERNELS = TritonAttention("triton")
KERNELS.tiles = Tiles(16, 16, 4, 2, 16, 16, 8)  # small: several tiles


def solve(
    case: Problem, kernels: TritonAttention = KERNELS, wanted: tuple[str, ...] = NAMES
) -> dict[str, torch.Tensor]:
    windows = case.query.new_zeros(case.query.shape[0], case.position.shape[-1] - 1, 0)
    given = (case.windows if case.windows is not None else windows, case.to_key, case.to_value)
    inputs = AttentionInputs(case.query, case.key, case.value, case.position, *given, case.boundaries)
    after, saved = kernels.forward(inputs, True)
    needs = tuple(name in wanted and name in case.tensors for name in NAMES)
    found = kernels.backward(inputs, after, saved, (case.grad,), needs)
    assert [one is not None for one in found] == [*needs]
    return {"result": after[0]} | {name: one for name, one in zip(NAMES, found, strict=True) if one is not None}


def error(case: Problem, kernels: TritonAttention = KERNELS) -> float:
    found = solve(case, kernels)
    assert all(one.dtype == case.query.dtype for one in found.values())
    return worst_error(found, exact(case.to(torch.float64)))


def errors(name: str) -> float:
    dtype = getattr(torch, name)
    cases = [
        problem((2, 45), 2, 16, 7, 9, dtype, 0.05),
        problem((50,), 1, 20, 37, 18, dtype, 0.02, seed=1),
        problem((3, 5), 3, 8, 12, 33, dtype, 0.3, seed=2),
    ]
    return max(map(error, cases))


def alone() -> float:
    """Compare the attention to the stream alone."""
    cases = [problem((70,), 2, 16, past, 0, torch.float32, 0.02, seed=past) for past in (1, 16, 33)]
    return max(map(error, cases))


def tiles() -> float:
    """Compare tiles of different sizes."""
    worst = 0.0
    for sizes in ((32, 16, 4, 2, 16, 16, 8), (16, 32, 4, 2, 32, 32, 8)):
        kernels = TritonAttention("triton")
        kernels.tiles = Tiles(*sizes)
        worst = max(worst, error(problem((75,), 2, 4, 20, 6, torch.float32, 0.03), kernels))
    return worst


def sparse() -> float:
    """Windows of every S-th token, and resets between."""
    worst = 0.0
    for spacing in (1, 3, 24, 48):
        case = problem((2, 48), 2, 8, 7, 6, torch.float32, 0.1)
        worst = max(worst, error(replace(case, windows=case.windows[::spacing].contiguous())))
    return worst


def isolation() -> int:
    """Check what tokens, gradients and windows that aren't finite reach."""
    for poison in (torch.nan, torch.inf):
        case = problem((30,), past=4, rate=0.0, dtype=torch.float32)
        check_isolation(case, solve, poison, exactly=poison != poison)
    return 0


def overflow() -> int:
    """Check that products which overflow reach no other segment."""
    for dtype in (torch.float32, torch.bfloat16):
        check_overflow(problem((2, 20), width=0, past=6, dtype=dtype), solve, 3e38)
    return 0


def wanted() -> int:
    """Check that unneeded gradients are None, and don't change the others."""
    case = problem((20,), dtype=torch.float32)
    every = solve(case)
    return sum(not torch.equal(solve(case, wanted=(name,))[name], every[name]) for name in NAMES)


def strides() -> float:
    """Compare expanded and transposed tensors."""
    case = problem((20,), 2, 4, 5, 6, torch.float32)
    expanded = replace(
        case,
        windows=case.windows[:1].expand(20, 5, 6),
        position=case.position[:1].expand(20, 2, 6),
        grad=case.grad[:, :, :1].expand(20, 2, 4),
    )
    turned = replace(case, query=case.query.mT.contiguous().mT, windows=case.windows.mT.contiguous().mT)
    return max(error(expanded), error(turned))


def step() -> float:
    """Compare one step of every row, and the windows after it, with the operations of torch."""
    worst = 0.0
    for heads, size, past, width in ((2, 16, 7, 9), (1, 20, 33, 18), (3, 8, 1, 33)):
        case = problem((6,), heads, size, past, width, torch.float32, 1.0)
        attention = Attention(case.query, case.key, case.value, case.position, case.to_key, case.to_value)
        inputs = torch.cat([torch.randn(6, width - 1), torch.ones(6, 1)], 1)
        windows = torch.where(case.windows[..., -1:] > 0, case.windows, torch.nan)
        windows[..., -1] = case.windows[..., -1]
        found, wanted = run_step(attention, inputs, windows, "ieee"), ONE_STEP.attend(attention, inputs, windows)
        assert torch.equal(found[1], wanted[1])
        worst = max(worst, relative_error(found[0], wanted[0]), relative_error(found[0], exact(case)["result"]))
    return worst


CHECKS = {
    "step": step,
    **{name: partial(errors, name) for name in ("float32", "float16", "bfloat16")},
    "alone": alone,
    "tiles": tiles,
    "sparse": sparse,
    "isolation": isolation,
    "overflow": overflow,
    "wanted": wanted,
    "strides": strides,
}

if __name__ == "__main__":
    print_checks(CHECKS)
