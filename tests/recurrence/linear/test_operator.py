"""Contract tests of all backends of linear recurrences."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.relative_error import relative_error
from recurl.recurrence import Boundaries, linear_recurrence, record_backends

from .problems import BACKENDS, DTYPES, KERNELS, exact, problem, worst_error

SHAPES = [(1,), (40,), (3, 7), (5, 1), (2, 1, 65)]


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_result_and_gradients_are_exact(backend, dtype, constant):
    for seed, shape in enumerate(SHAPES):
        for rate in (0.0, 0.3, 1.0):
            case = problem(shape, (5,), dtype, constant, rate, seed)
            assert worst_error(case.solve(backend), exact(case)) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=25)
@given(st.lists(st.booleans(), min_size=1, max_size=70), st.integers(1, 19), st.booleans(), st.booleans())
def test_any_boundaries_and_widths(backend, starts, width, constant, imaginary):
    case = problem((len(starts),), (width,), DTYPES[imaginary], constant, seed=width)
    case = replace(case, boundaries=Boundaries.from_is_init(torch.tensor(starts)))
    assert worst_error(case.solve(backend), exact(case)) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_channels_of_any_shape(backend):
    for channels in ((2, 3), (1,), (2, 1, 2)):
        for constant in (False, True):
            case = problem((4, 3), channels, constant=constant)
            assert worst_error(case.solve(backend), exact(case)) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_segments_vanish(backend):
    case = problem((9,))
    boundaries = Boundaries.from_cu_seqlens(torch.tensor([0, 0, 4, 4, 4, 5, 9, 9]), 9)
    case = replace(case, boundaries=boundaries)
    assert worst_error(case.solve(backend), exact(case)) <= 1e-12


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend, shape):
    for found in problem(shape).solve(backend):
        assert not found.numel() or not found.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_channels(backend):
    assert problem((3, 4), (0,)).solve(backend)[0].shape == (12, 0)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_poison_stays_in_its_segment(backend, constant, poison):
    """Poison in a, b, a state that is read, or the gradient; with zeros in a next to it, since 0 * inf is NaN."""
    case = problem((30,), rate=0.0, constant=constant)
    boundaries = Boundaries.from_is_init(torch.arange(30) % 10 == 0)
    case = replace(case, boundaries=boundaries)
    if not constant:
        case.a[[10, 20]] = 0.0
    clean = case.solve(backend)
    inside = torch.zeros(30, dtype=torch.bool)
    inside[10:20] = True
    for name in ("b", "states", "grad") if constant else ("a", "b", "states", "grad"):
        bad = getattr(case, name).clone()
        bad[10 if name == "states" else 14] = poison
        found = replace(case, **{name: bad}).solve(backend)
        assert not all(one[inside].isfinite().all() for one in found if one.ndim > 1)
        for one, other in zip(found, clean, strict=True):
            if one.ndim > 1:
                assert torch.equal(one[~inside], other[~inside])


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_that_are_not_read_change_nothing(backend):
    for constant in (False, True):
        case = problem((4, 9), constant=constant)
        poisoned = case.states.clone()
        poisoned[~case.boundaries.starts] = torch.nan
        for one, other in zip(replace(case, states=poisoned).solve(backend), case.solve(backend), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_stays_to_the_end_of_its_segment(backend):
    """Neither a coefficient of zero nor a decay to zero removes it."""
    case = problem((400,), rate=0.0, decay=(0.0, 0.01))
    case.a[7] = 0.0
    case.b[5] = torch.nan
    h = case.solve(backend)[0]
    assert h[:5].isfinite().all()
    assert h[5:].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_any_strides(backend):
    for dtype in DTYPES:
        case = problem((4, 9), (6,), dtype)
        expected = exact(case)
        transposed = [one.t().contiguous().t() for one in (*case.tensors, case.grad)]
        a, b, states, grad = transposed
        assert worst_error(replace(case, a=a, b=b, states=states, grad=grad).solve(backend), expected) <= 1e-12
        expanded = replace(case, b=case.b[:1].expand(36, 6), states=case.states[:, :1].expand(36, 6))
        expanded = replace(expanded, grad=case.grad[:1, :1].expand(36, 6), a=case.a[:, :1].expand(36, 6))
        assert worst_error(expanded.solve(backend), exact(expanded)) <= 1e-12
        if dtype.is_complex:
            conjugate = replace(case, a=case.a.conj(), b=case.b.conj(), states=case.states.conj(), grad=grad.conj())
            assert worst_error(conjugate.solve(backend), exact(conjugate)) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.complex64])
@pytest.mark.parametrize("backend", KERNELS)
def test_lower_precisions_are_as_good_as_their_rounding(backend, dtype):
    """Compared with float64 on the same inputs: the state is carried in higher precision."""
    limit = {torch.bfloat16: 4e-3, torch.float16: 5e-4}.get(dtype, 1e-7)
    for constant in (False, True):
        case = problem((4, 300), (8,), dtype, constant, rate=0.01)
        found, wide = case.solve(backend), torch.complex128 if dtype.is_complex else torch.float64
        assert all(one.dtype == dtype for one in found)
        assert worst_error(found, exact(case.to(wide))) <= limit


@pytest.mark.slow
@cache
def long_problem(constant):
    """100,000 steps with three decay rates in parallel, solved once for all backends."""
    case = problem((100_000,), (3,), torch.float64, constant, 0.0)
    slowness = torch.tensor([1e-4, 1e-5, 1e-6], dtype=torch.float64)
    case = replace(case, a=1 - slowness * case.a).to(torch.float32)
    return case, exact(case.to(torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
def test_long_sequences_with_decay_near_one(backend):
    for constant in (False, True):
        case, expected = long_problem(constant)
        found = case.solve(backend)
        for channel in range(3):
            parts = (tuple(one[..., channel] for one in results) for results in (found, expected))
            assert worst_error(*parts) <= 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_input_same_bits(backend):
    for dtype in (torch.float32, torch.complex64):
        for constant in (False, True):
            case = problem((3, 200), (7,), dtype, constant, 0.02)
            for one, other in zip(case.solve(backend), case.solve(backend), strict=True):
                assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_any_order_and_direction(backend, constant, dtype):
    case = problem((9,), (2,), dtype, constant, 0.3)
    tensors = [one.detach().requires_grad_() for one in case.tensors]

    def run(*tensors):
        return linear_recurrence(*tensors, case.boundaries, backend)

    assert torch.autograd.gradcheck(run, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_wanted_gradients(backend):
    case = problem()
    expected = exact(case)[1:]
    for wanted in range(3):
        tensors = [one.detach() for one in case.tensors]
        tensors[wanted].requires_grad_()
        h = linear_recurrence(*tensors, case.boundaries, backend)
        assert relative_error(torch.autograd.grad(h, tensors[wanted], case.grad)[0], expected[wanted]) <= 1e-12
    with torch.no_grad():
        assert not linear_recurrence(*tensors, case.boundaries, backend).requires_grad


def test_a_segment_may_be_split():
    case = problem((60,), rate=0.0)
    starts = torch.arange(60) % 20 == 0
    whole = linear_recurrence(*case.tensors, case.boundaries, "loop")
    states = torch.where(starts.unsqueeze(1), torch.cat([case.states[:1], whole[:-1]]), torch.nan)
    for backend in BACKENDS:
        parts = linear_recurrence(case.a, case.b, states, Boundaries.from_is_init(starts), backend)
        assert relative_error(parts, whole) <= 1e-12


def test_automatic_choices():
    case = problem()
    with record_backends() as ran:
        linear_recurrence(*case.tensors, case.boundaries, "auto")
        linear_recurrence(*case.tensors, case.boundaries)
    assert ran[0] == "loop"
    assert ran[1] in ("cpu", "loop")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: replace(c, a=c.a.float()),
            "must have the same dtype, one of bfloat16.*got torch.float32, torch.float64 and",
        ),
        (lambda c: c.to(torch.int64), "must have the same dtype.*got torch.int64"),
        (lambda c: replace(c, a=c.a[:, :4]), r"a must have the same shape, or \(5,\).*got \(21, 4\) and \(21, 5\)"),
        (lambda c: replace(c, a=c.a[:, :1]), "Expand them"),
        (lambda c: replace(c, states=c.states[:1]), r"and states the same shape; got \(21, 5\) and \(1, 5\)"),
        (lambda c: replace(c, b=c.b[:20]), r"the N=21 tokens of the boundaries; got \(20, 5\)"),
        (lambda c: replace(c, b=c.b.reshape(3, 7, 5)), "Flatten a batch"),
        (lambda c: replace(c, b=c.b[:, 0]), r"got \(21,\)"),
        (lambda c: replace(c, a=c.a.to("meta")), "must be on one device; got meta, cpu, cpu and cpu"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    case = change(problem())
    with pytest.raises(ArgumentError, match=message):
        linear_recurrence(*case.tensors, case.boundaries)


def test_unknown_backend():
    with pytest.raises(ArgumentError, match=r"must be one of auto, fastest, loop.*got 'pad'"):
        linear_recurrence(*problem().tensors, problem().boundaries, "pad")


def test_the_reference_is_not_traced():
    case = problem()
    run = torch.compile(lambda *tensors: linear_recurrence(*tensors, case.boundaries, "reference"), fullgraph=True)
    with pytest.raises(
        (UnsupportedError, torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported)
    ) as caught:
        run(*case.tensors)
    assert "loops over tokens on the host" in str(caught.value)
