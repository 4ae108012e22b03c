"""Contract tests of all backends of windowed attention."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap
from torch.library import opcheck

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.relative_error import relative_error
from recurl.modules import GTrXLModule
from recurl.recurrence import Boundaries, record_backends
from recurl.recurrence.attention import chunked, windowed_attention
from recurl.recurrence.attention.kernels import AttentionInputs
from recurl.recurrence.attention.operator import layer_call
from recurl.recurrence.backend import OperatorSupport
from recurl.recurrence.built_in import ATTENTION, OPERATIONS
from recurl.recurrence.cells.attention import Attention
from recurl.recurrence.operation import arguments_of

from .problems import NAMES, Problem, exact, problem, reached, worst_error

BACKENDS = ("reference", "chunked")
SHAPES = [(1,), (40,), (3, 7), (5, 1), (2, 1, 19)]
SICK = 12


@pytest.mark.parametrize("width", [5, 0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_result_and_gradients_are_exact(backend: str, width: int) -> None:
    for seed, shape in enumerate(SHAPES):
        for rate in (0.0, 0.3, 1.0):
            case = problem(shape, width=width, rate=rate, seed=seed)
            assert worst_error(case.solve(backend), exact(case)) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=25)
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 40), st.integers(1, 3), st.booleans())
def test_any_boundaries_and_windows(backend: str, starts: list[bool], past: int, heads: int, readable: bool) -> None:
    case = problem((len(starts),), heads, past=past, seed=past)
    case = replace(case, boundaries=Boundaries.from_is_init(torch.tensor(starts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "readable", lambda value: readable)
        assert worst_error(case.solve(backend), exact(case)) <= 1e-12


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spacing", [3, 4, 12])
def test_windows_of_every_s_th_token(
    spacing: int, backend: str, readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment that starts elsewhere has none; also gradients that aren't finite, and transforms of functions."""
    monkeypatch.setattr(chunked, "readable", lambda value: readable)
    case = problem((3, 12), seed=spacing)
    dense, sparse = case.windows.clone(), case.windows[::spacing].clone()
    dense[torch.arange(36) % spacing > 0] = 0
    wanted, found = (replace(case, windows=one).solve(backend) for one in (dense, sparse))
    wanted["windows"] = wanted["windows"][::spacing]
    assert worst_error(found, wanted) <= 1e-12
    rest = {name: one for name, one in case.tensors.items() if name != "windows"}

    def loss(windows: torch.Tensor) -> torch.Tensor:
        result = windowed_attention(**rest, windows=windows, boundaries=case.boundaries, recurrent_backend=backend)
        return (result * case.grad).sum()

    assert relative_error(grad(loss)(sparse), found["windows"]) <= 1e-12
    if backend == "chunked":
        both = vmap(grad(loss))(torch.stack([sparse, sparse]))
        assert relative_error(both[1], found["windows"]) <= 1e-12
        case.grad[5] = torch.nan
        wanted, found = (replace(case, windows=one).solve(backend) for one in (dense, sparse))
        wanted["windows"] = wanted["windows"][::spacing]
        for name, one in found.items():
            torch.testing.assert_close(one, wanted[name], equal_nan=True)


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_poison_reaches_only_those_that_attend(
    backend: str, poison: float, readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tokens and of gradients; infinities, and the reference, may leave a number finite that could be reached."""
    monkeypatch.setattr(chunked, "readable", lambda value: readable)
    exactly = poison != poison and backend != "reference"
    check_isolation(problem((30,), rate=0.0, past=4), lambda case: case.solve(backend), poison, exactly)


def check_isolation(case: Problem, solve, poison: float, exactly: bool) -> None:
    """Check what one poisoned token out of 30 in three segments reaches, and one poisoned input of a window."""
    case.boundaries.starts[[10, 20]] = True
    case = replace(case, boundaries=Boundaries(case.boundaries.starts, (30,)))
    case.windows[10, :, -1] = 1
    clean = solve(case)
    for name in ("query", "key", "value", "position", "grad"):
        bad = getattr(case, name).clone()
        bad[SICK, 0] = poison
        found, where = solve(replace(case, **{name: bad})), reached(case, torch.arange(30) == SICK)
        alone = name in ("query", "position")
        result = torch.arange(30) == SICK if alone else where["result"]
        sick = where["seen"] if alone else where["attended"]
        if name == "grad":
            result, sick = torch.zeros(30, dtype=torch.bool), where["seen"]
        own = torch.arange(30) == SICK if name == "grad" else result
        for of, at in (("result", result), ("query", own), ("position", own), ("key", sick), ("value", sick)):
            check_reached(found[of], clean[of], at, exactly, f"{name} to {of}")
        inside = torch.zeros(30, dtype=torch.bool)
        inside[10] = True
        check_reached(found["windows"], clean["windows"], inside, exactly, f"{name} to windows")
    windows = case.windows.clone()
    windows[10, 1, 0] = poison
    found = solve(replace(case, windows=windows))
    readers = (torch.arange(30) >= 10) & (torch.arange(30) < 12)
    seen = reached(case, readers)["seen"]
    for of, at in (("result", readers), ("query", readers), ("key", seen), ("value", seen)):
        check_reached(found[of], clean[of], at, exactly, f"windows to {of}")
    windows = torch.where((case.windows[..., -1:] > 0) & case.boundaries.starts[:, None, None], case.windows, torch.nan)
    windows[..., -1] = case.windows[..., -1]
    for of, one in solve(replace(case, windows=windows)).items():
        assert of == "windows" or torch.equal(one, clean[of]), f"what isn't read changes {of}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 6e4), (torch.float64, 1e308)], ids=str)
def test_what_overflows_reaches_no_other_segment(backend: str, dtype: torch.dtype, large: float) -> None:
    check_overflow(problem((2, 20), width=0, past=6, dtype=dtype), lambda case: case.solve(backend), large)


def check_overflow(case: Problem, solve, large: float) -> None:
    """Check large values, whose products with gradients of tokens that don't attend to them overflow."""
    segment = case.boundaries.segment_ids == case.boundaries.segment_ids[25]
    incoming = torch.where(segment[:, None, None], 0, case.grad.abs() + 1)
    clean = solve(replace(case, grad=incoming))
    value = torch.where(segment[:, None, None], large, case.value)
    found = solve(replace(case, grad=incoming, value=value))
    for name, one in found.items():
        torch.testing.assert_close(one[~segment], clean[name][~segment], rtol=0, atol=0, msg=name)


def check_reached(found: torch.Tensor, clean: torch.Tensor, at: torch.Tensor, exactly: bool, what: str) -> None:
    broken = ~found.flatten(1).isfinite().all(1)
    assert not (broken & ~at).any(), what
    assert not exactly or (broken == at).all(), what
    torch.testing.assert_close(found[~at], clean[~at], msg=what)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_input_same_bits(backend: str) -> None:
    case = problem((3, 40), dtype=torch.float32)
    one, other = case.solve(backend), case.solve(backend)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precisions_are_as_good_as_their_rounding(dtype: torch.dtype) -> None:
    case = problem((4, 100), 2, 16, 32, 17, dtype, 0.05)
    found = case.solve("chunked")
    assert all(one.dtype == dtype for one in found.values())
    assert worst_error(found, exact(case.to(torch.float64))) <= 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_lower_precisions_are_float32(dtype: torch.dtype) -> None:
    """By sequences and by one step, of the stream and of stored windows: scores of 30 are 0.1 apart in bfloat16."""
    for shape, rate in (((4, 100), 0.05), ((7, 1), 1.0)):
        case = problem(shape, 2, 16, 32, 17, torch.float64, rate)
        case = replace(case, query=8 * case.query, position=8 * case.position).to(dtype)
        expected = exact(case.to(torch.float64))["result"]
        assert relative_error(case.solve("chunked")["result"], expected) <= 2 * torch.finfo(dtype).eps
    given = (case.query, case.key, case.value, case.position, case.to_key, case.to_value)
    assert relative_error(Attention(*given).once(case.windows), expected) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("low", [-1e9, -2e38, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_distance_that_is_left_out(backend: str, low: float) -> None:
    """A token without another key attends to itself, however low its score."""
    case = problem((40,), width=0, dtype=torch.float32, rate=0.3)
    case.position[:, :, 0] = low
    alone = case.boundaries.starts
    found = case.solve(backend)
    assert torch.equal(found["result"][alone], case.value[alone])
    assert worst_error(found, exact(case.to(torch.float64))) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_nothing_to_do(backend: str, shape: tuple[int, ...]) -> None:
    assert problem(shape).solve(backend)["result"].shape == (0, 2, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_wanted_gradients(backend: str) -> None:
    case = problem()
    expected = exact(case)
    for wanted in NAMES:
        leaves = {name: one.detach().requires_grad_(name == wanted) for name, one in case.tensors.items()}
        result = windowed_attention(**leaves, boundaries=case.boundaries, recurrent_backend=backend)
        (found,) = torch.autograd.grad(result, leaves[wanted], case.grad)
        assert relative_error(found, expected[wanted]) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_of_second_order_and_in_forward_mode(backend: str) -> None:
    case = problem((5,), 1, 2, 2, 3)
    case.windows[..., -1] = 1
    leaves = [one.detach().requires_grad_() for one in case.tensors.values()]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return windowed_attention(*tensors[:4], case.boundaries, *tensors[4:], recurrent_backend=backend)

    assert torch.autograd.gradgradcheck(run, leaves)
    tangents = tuple(torch.randn_like(one) for one in leaves)
    _, along = jvp(run, tuple(case.tensors.values()), tangents)
    gradients = exact(case)
    expected = sum((gradients[name] * t).sum() for name, t in zip(NAMES, tangents, strict=True))
    assert abs((along * case.grad).sum() - expected) <= 1e-10


@pytest.mark.parametrize("mapped", [NAMES[:5], NAMES, ("query",)])
def test_vmap_equals_a_loop(mapped: tuple[str, ...]) -> None:
    cases = [problem((9,), seed=seed) for seed in range(3)]
    stacked = {
        name: torch.stack([case.tensors[name] for case in cases]) if name in mapped else cases[0].tensors[name]
        for name in NAMES
    }

    def loss(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        found = windowed_attention(**tensors, boundaries=cases[0].boundaries, recurrent_backend="chunked")
        return (found * cases[0].grad).sum()

    def one(index: int) -> dict[str, torch.Tensor]:
        return {name: value[index] if name in mapped else value for name, value in stacked.items()}

    dims = ({name: 0 if name in mapped else None for name in NAMES},)
    expected = [grad(loss)(one(index)) for index in range(3)]
    for name, found in vmap(grad(loss), dims)(stacked).items():
        assert relative_error(found, torch.stack([each[name] for each in expected])) <= 1e-12


def test_vmap_without_windows() -> None:
    case = problem((9,), width=0)
    rest = [case.key, case.value, case.position, case.boundaries]
    queries = torch.stack([case.query, 2 * case.query])
    found = vmap(lambda query: windowed_attention(query, *rest))(queries)
    assert relative_error(found, torch.stack([windowed_attention(query, *rest) for query in queries])) <= 1e-12


@pytest.mark.slow
def test_opcheck() -> None:
    case, operation = problem(), OPERATIONS["attention_chunked"]
    for windows in (case.windows, case.windows[::7].clone()):
        tensors = replace(case, windows=windows).tensors.values()
        call = layer_call(AttentionInputs(*[one.detach().requires_grad_() for one in tensors], case.boundaries))
        opcheck(operation.forward, (*arguments_of(call), False))


@pytest.mark.slow
def test_compiled() -> None:
    """One graph for several lengths, with gradients."""

    def run(*tensors: torch.Tensor, is_init: torch.Tensor) -> torch.Tensor:
        boundaries = Boundaries.from_is_init(is_init)
        return windowed_attention(*tensors[:4], boundaries, *tensors[4:], recurrent_backend="auto")

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 7), (2, 12)):
        case = problem(shape)
        leaves = [one.detach().requires_grad_() for one in case.tensors.values()]
        result = compiled(*leaves, is_init=case.boundaries.starts.view(shape))
        found = torch.autograd.grad(result, leaves, case.grad)
        assert worst_error(dict(zip(NAMES, found, strict=True)), exact(case)) <= 1e-12


def test_a_module_is_copied_and_saved() -> None:
    module = GTrXLModule(3, 4, window=3, heads=2, in_key="x", out_key="y", recurrent_backend="loop")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_automatic_choices() -> None:
    case = problem()
    with record_backends() as ran:
        for backend in ("auto", "fastest", "cpu", "scan"):
            windowed_attention(**case.tensors, boundaries=case.boundaries, recurrent_backend=backend)
    assert ran == ["loop", "loop", "cpu", "scan"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, key=c.key.float()), "same dtype, one of bfloat16.*got torch.float32, torch.float64"),
        (lambda c: c.to(torch.int64), "must have the same dtype.*got torch.int64"),
        (lambda c: replace(c, query=c.query.flatten(1)), r"split a width that the heads divide by unflatten"),
        (lambda c: replace(c, query=c.query[:20]), r"the N=21 tokens of the boundaries; got \(20, 2, 3\)"),
        (lambda c: replace(c, position=c.position[..., :1]), r"with M at least 1.*got \(21, 2, 1\)"),
        (lambda c: replace(c, windows=c.windows[:, 1:]), r"N=21 and M=4.*got \(21, 3, 5\)"),
        (lambda c: replace(c, windows=c.windows[:2]), r"where S divides the T=7 tokens of a row; got \(2, 4, 5\)"),
        (lambda c: replace(c, to_key=c.to_key[:1]), r"each \(2, 3, 5\); got to_key \(1, 3, 5\)"),
        (lambda c: replace(c, to_value=None), r"got to_key \(2, 3, 5\)"),
        (lambda c: replace(c, windows=None), "pass windows too"),
        (lambda c: replace(c, value=c.value.to("meta")), "must be on one device; got cpu, meta"),
    ],
)
def test_what_does_not_fit_is_refused(change, message: str) -> None:
    case = change(problem())
    with pytest.raises(ArgumentError, match=message):
        windowed_attention(**case.tensors, boundaries=case.boundaries)


def test_backends_that_cannot_are_refused() -> None:
    case = problem()
    with pytest.raises(ArgumentError, match=r"must be one of auto, fastest, chunked, loop.*got 'pad'"):
        windowed_attention(**case.tensors, boundaries=case.boundaries, recurrent_backend="pad")
    with pytest.raises(ArgumentError, match="precision must be one of ieee, tf32, tf32x3; got 'fast'"):
        windowed_attention(**case.tensors, boundaries=case.boundaries, precision="fast")
    with pytest.raises(UnsupportedError, match=r"'triton' can't run this windowed attention: it needs"):
        ATTENTION.choose("triton", OperatorSupport(torch.device("cpu"), torch.float32))
