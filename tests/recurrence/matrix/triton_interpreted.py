"""Run the matrix recurrence kernels in Triton's interpreter, with TRITON_INTERPRET=1 in the environment.

Prints one line per check: ``name: error``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recurl.core.relative_error import relative_error
from recurl.recurrence.cuda.matrix.backend import TritonMatrix
from recurl.recurrence.cuda.matrix.config import Plan, Tile, plan_for

from ..interpreter import allow_bfloat16, allow_bounds, patch_once
from ..kernel_tests import print_checks
from .triton_problems import Problem, errors, exact, outputs, problem, solve

allow_bounds()
patch_once()
allow_bfloat16()


def kernels(chunk: int = 16, piece: int = 1000, columns: int = 64) -> TritonMatrix:
    """Return kernels with a small plan."""
    tile = Tile(columns, 4, 1)
    return TritonMatrix(lambda _: Plan(chunk, piece, tile, tile, tile, Tile(16, 4, 1), Tile(64, 4, 1)))


def error(case: Problem, runner: TritonMatrix, dtype: torch.dtype = torch.float32) -> float:
    """Return the worst error of all results; those of narrow dtypes are compared for the rounded inputs."""
    rounded = case.to(dtype)
    found = solve(rounded, runner)
    assert all(one is None or one.dtype == dtype for one in (found[0], *found[2:5]))
    return max(errors(found, exact(rounded.to(torch.float64))).values())


def row_errors(delta: bool) -> float:
    """Rows of one chunk and of several, odd, with starts anywhere, with and without stored states and states after."""
    cases = [
        problem((3, 5), delta=delta, resets=0.4),
        problem((2, 37), 2, delta=delta, resets=0.2),
        problem((33,), delta=delta, resets=0.0, stored=False, after=False),
        problem((2, 40), delta=delta, resets=0.15, after=False),
        problem((2, 40), delta=delta, resets=1.0, sizes=(1, 1)),
    ]
    return max(error(case, kernels()) for case in cases)


def piece_errors(delta: bool) -> float:
    """Rows in pieces, some without a start, some that begin with one, blocks of V, and more keys than columns."""
    case = problem((2, 117), delta=delta, resets=0.03, sizes=(5, 18))
    found = [error(case, kernels(piece=2)), error(case, kernels(32, 1, 16)), error(case, kernels(piece=5))]
    case = problem((150,), delta=delta, resets=0.0, starts=(48, 64, 96, 97))
    found += [error(case, kernels(piece=piece)) for piece in (3, 4)]
    return max(*found, error(problem((1, 40), delta=delta, resets=0.0, sizes=(20, 3)), kernels(piece=1)))


def sparse_errors(delta: bool) -> float:
    """States of every S-th token, of which some lie inside chunks and others where chunks begin."""
    worst = 0.0
    for spacing, piece, after in ((1, 1000, True), (4, 1000, True), (12, 2, False), (20, 2, True), (60, 1000, False)):
        case = problem((2, 60), 2, (5, 18), delta, resets=0.2, after=after, starts=(4, 12, 17, 32, 36, 63, 76))
        assert case.inputs.states is not None
        sparse = case.inputs.states[::spacing]
        sparse = replace(case, inputs=case.inputs._replace(states=sparse))
        worst = max(worst, error(sparse, kernels(piece=piece)))
    return worst


def inference_error(delta: bool) -> float:
    """Without saved tensors."""
    worst = 0.0
    for piece in (1000, 2):
        case = problem((2, 70), delta=delta, resets=0.03).to(torch.float32)
        (output,), saved = kernels(piece=piece).forward(case.inputs._replace(after=False), False)
        assert saved == ()
        (full, _), _ = kernels(piece=piece).forward(case.inputs, True)
        worst = max(worst, (output - full).abs().max().item())
    return worst


def expanded_error() -> float:
    """Compare inputs that are parts of one tensor, and expanded states and gradients, with their copies."""
    case = problem((2, 20), 2, (4, 4)).to(torch.float32)
    inputs = case.inputs
    joined = torch.cat([inputs.query, inputs.key, inputs.value], -1)
    query, key, value = joined.split(4, -1)
    states = torch.randn(1, 2, 1, 1).expand(40, 2, 4, 4)
    parts = inputs._replace(query=query, key=key, value=value, states=states)
    copies = inputs._replace(states=states.contiguous())
    grad = case.grad[:1].expand(40, 2, 4)
    one, other = Problem(parts, grad, case.grad_after), Problem(copies, grad.contiguous(), case.grad_after)
    return max(errors(solve(one, kernels()), solve(other, kernels())).values())


def repeated_keys(rate: float) -> Problem:
    """Return a problem with the same key and rate at every token, without decay."""
    case = problem((1, 64), resets=0.0, decay=0.0)
    key = case.inputs.key[:1].expand_as(case.inputs.key).contiguous()
    return replace(case, inputs=case.inputs._replace(key=key, rate=torch.full_like(case.inputs.rate, rate)))


def bfloat16_error() -> float:
    """Random inputs, and repeated keys, whose errors add up if a chunk's solution is rounded."""
    random, repeated = (problem((2, 37)), kernels()), (repeated_keys(0.95), kernels(32))
    return max(error(*case, torch.bfloat16) for case in (random, repeated))


def fast_decay_error() -> float:
    """Decays whose product over a chunk is zero, some of them zero themselves; and decays with gradients of 1e-9."""
    worst = 0.0
    for delta in (False, True):
        case = problem((2, 37), delta=delta, decay=60.0)
        log_decay = case.inputs.log_decay.clone()
        log_decay[[5, 20]] = -torch.inf
        worst = max(worst, error(replace(case, inputs=case.inputs._replace(log_decay=log_decay)), kernels()))
        case = problem((2, 8), delta=delta, after=False)
        faster = case.inputs._replace(log_decay=case.inputs.log_decay - 20)
        worst = max(worst, error(replace(case, inputs=faster), kernels()))
    return worst


POISONED = ("query", "key", "value", "log_decay", "rate", "states", "grad", "grad_after")


def isolation(delta: bool) -> int:
    """Count wrong effects of a number that isn't finite.

    No other segment and no other head may change. Bad inputs of the recurrence spoil outputs from their token on, a bad
    query its own output, and a bad gradient no gradient after it; what they spoil is NaN or infinite.
    """
    case = problem((75,), 2, delta=delta, resets=0.0, starts=(10, 40, 44)).to(torch.float32)
    token = {"states": 10, "grad_after": 39}
    assert case.grad_after is not None
    case = replace(case, grad_after=case.grad_after.nan_to_num())
    outside = torch.ones(75, 2, dtype=torch.bool)
    outside[10:40, 1] = False
    wrong = 0
    for piece, poison in ((1000, torch.nan), (2, torch.inf)):
        clean = solve(case, kernels(piece=piece))
        assert all(one is not None and one.isfinite().all() for one in clean)
        for name in POISONED:
            n = token.get(name, 22)
            found = solve(case.poisoned(name, n, poison), kernels(piece=piece))
            pairs = [(one, other) for one, other in zip(found, clean, strict=True) if one is not None]
            wrong += sum(not torch.equal(one[outside], other[outside]) for one, other in pairs if other is not None)
            output, *gradients = found[0], *found[2:7]
            wrong += not torch.equal(output[10:n, 1], clean[0][10:n, 1])
            if "grad" in name:
                wrong += not torch.equal(output, clean[0])
                wrong += any(not one[n + 1 : 40, 1].isfinite().all() for one in gradients)
                wrong += any(_finite(one[10:n, 1]).any() for one in gradients[1:])
            elif name == "query":
                wrong += int(output[n, 1].isfinite().any()) + int(not output[n + 1 : 40, 1].isfinite().all())
            else:
                wrong += int(_finite(output[n:40, 1]).any()) + int(_finite(gradients[0][n:40, 1]).any())
            if name == "value":
                wrong += any(not one[10:n, 1].isfinite().all() for one in gradients)
    return int(wrong)


def _finite(x: Tensor) -> Tensor:
    """Return which tokens are finite altogether."""
    return x.isfinite().reshape(x.shape[0], -1).all(1)


def silent() -> int:
    """Count gradients that are finite although the loop's aren't, and results wrong of products that aren't finite."""
    case = problem((1, 40), delta=True, resets=0.0)
    wrong = 0
    for name in POISONED[:5]:
        poisoned = case.poisoned(name, 20)
        found, expected = solve(poisoned.to(torch.float32), kernels()), exact(poisoned)
        for one, other in zip(found, expected, strict=True):
            if one is not None and other is not None:
                lost = _finite(one) & ~_finite(other)
                wrong += int(lost.sum())
    for key, rate, log_decay in ((3e19, 0.5, 0.0), (1.5e19, 2.0, 0.0), (1e7, 1e25, 0.0), (1e19, 0.5, 2.0)):
        case = problem((1, 40), delta=True, resets=0.0, starts=(20,), stored=False, after=False)
        case.inputs.key[20:22] = key
        case.inputs.rate[20:22] = rate
        case.inputs.log_decay[20:22] = log_decay
        output, _, *gradients = solve(case.to(torch.float32), kernels())
        wrong += int((~_finite(output[:20])).sum()) + int(_finite(output[21:]).sum())
        wrong += sum(int((~_finite(one[:20])).sum()) for one in gradients if one is not None)
        assert gradients[2] is not None
        wrong += int(_finite(gradients[2][20:21]).sum())  # of a value, which the product that isn't finite reads
    return wrong


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    st.integers(1, 3),
    st.integers(1, 50),
    st.integers(1, 2),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.booleans(),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([16, 32]),
    st.integers(1, 4),
    st.integers(0, 9),
)
def fuzz(
    rows: int,
    length: int,
    heads: int,
    sizes: tuple[int, int],
    delta: bool,
    resets: float,
    stored: bool,
    after: bool,
    chunk: int,
    piece: int,
    seed: int,
) -> None:
    case = problem((rows, length), heads, sizes, delta, resets, stored, after, seed=seed)
    assert error(case, kernels(chunk, piece, 16)) < 3e-6


def fuzzed() -> int:
    fuzz()
    return 0


def step_error(delta: bool) -> float:
    """Compare steps, in place and not, with a row of two tokens; states of rows that start aren't read."""
    worst = 0.0
    for rows, sizes in ((1, (4, 3)), (5, (3, 20))):
        case = problem((rows, 2), 2, sizes, delta, resets=0.0)
        expected, after = outputs(case.inputs)
        inputs = case.to(torch.float32).inputs
        assert inputs.states is not None
        first = range(0, 2 * rows, 2)
        second = [n + 1 for n in first]
        arguments = [[one[which] for one in inputs[:5]] for which in (list(first), second)]
        runner = kernels()
        output, states = runner.step(*arguments[0], inputs.states[first], delta=delta)
        worst = max(worst, relative_error(output, expected[first]), relative_error(states, after[first]))
        again, kept = runner.step(*arguments[1], states, delta=delta, in_place=True)
        assert kept is states
        worst = max(worst, relative_error(again, expected[second]), relative_error(states, after[second]))
        is_init = torch.arange(rows) == 0
        stored = torch.where(is_init[:, None, None, None], torch.nan, inputs.states[first])
        fresh, _ = runner.step(*arguments[0], stored, is_init, delta=delta)
        none, _ = runner.step(*arguments[0], None, delta=delta)
        assert torch.equal(fresh[:1], none[:1])
        assert torch.equal(fresh[1:], output[1:])
    return worst


def planned_error() -> float:
    """The plans for real calls, with few multiprocessors so that rows are cut."""
    runner = TritonMatrix(lambda sizes: plan_for(replace(sizes, processors=2)))
    worst = error(problem((1, 530), resets=0.01, stored=False, after=False), runner)
    return max(worst, error(problem((1, 40), sizes=(70, 130)), runner))


CHECKS = {
    **{f"rows {name}": partial(row_errors, delta) for name, delta in (("plain", False), ("delta", True))},
    **{f"pieces {name}": partial(piece_errors, delta) for name, delta in (("plain", False), ("delta", True))},
    **{f"sparse {name}": partial(sparse_errors, delta) for name, delta in (("plain", False), ("delta", True))},
    **{f"inference {name}": partial(inference_error, delta) for name, delta in (("plain", False), ("delta", True))},
    **{f"isolation {name}": partial(isolation, delta) for name, delta in (("plain", False), ("delta", True))},
    **{f"step {name}": partial(step_error, delta) for name, delta in (("plain", False), ("delta", True))},
    "expanded": expanded_error,
    "repeated keys": lambda: error(repeated_keys(1.0), kernels(64)),  # powers of the matrix to invert reach 1e17
    "fast decay": fast_decay_error,
    "silent": silent,
    "planned": planned_error,
    "bfloat16": bfloat16_error,
    "float16": lambda: error(problem((2, 37)), kernels(), torch.float16),
    "fuzz": fuzzed,
}

if __name__ == "__main__":
    print_checks(CHECKS)
