from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.recurrence import BACKENDS, LSTM, Boundaries, Options, Support, run_stack
from tests.pairs import paired

from .contract import KNOWN, PATTERNS, Case, assert_agree, exact_and_allowed, serves

FAST = ["pad", "loop", "cpu", "scan"]
SERVED = [(name, cell) for cell in KNOWN for name in FAST if serves(name, cell)]
DENSE = [(name, cell) for name, cell in SERVED if name != "pad"]  # pad returns states only at segment ends
OPTIONS = [
    {},
    {"layers": 2},
    {"layers": 3, "dropout": 0.4},
    {"bias": False},
    {"directions": 2},
    {"layers": 2, "directions": 2, "dropout": 0.3},
]
PAIRED = paired(OPTIONS, PATTERNS)  # the first with all patterns
OTHERS = [*itertools.product(OPTIONS[-1:], PATTERNS), *paired(OPTIONS[1:-1], PATTERNS)]
PROBLEMS = [
    *(case if case[0] in (OPTIONS[0], OPTIONS[-1]) else pytest.param(*case, marks=pytest.mark.slow) for case in PAIRED),
    *(pytest.param(*case, marks=(pytest.mark.slow, pytest.mark.full)) for case in OTHERS if case not in PAIRED),
]
PROJECTED = [{"projection": 4}, {"projection": 3, "layers": 2, "directions": 2}]
SHAPES = [(2, 3, 6), (4, 9), (17,), (5, 1), (1, 1), (1,)]


@cache
def exact(cell: str, **problem: object) -> dict[str, Tensor]:
    """Results of the slow reference, computed once for all backends."""
    return Case(cell, **problem).outputs_and_gradients("reference")


def option_id(options: dict[str, object] | str) -> str:
    return options if isinstance(options, str) else ",".join(f"{k}={v}" for k, v in options.items()) or "plain"


@pytest.mark.parametrize(("backend", "cell"), SERVED)  # groups the backends of each problem
@pytest.mark.parametrize(("options", "pattern"), PROBLEMS, ids=option_id)
def test_agrees_with_reference(backend: str, cell: str, options: dict, pattern: str) -> None:
    case = Case(cell, pattern=pattern, **options)
    assert_agree(case.outputs_and_gradients(backend), exact(cell, pattern=pattern, **options), 1e-12)


@pytest.mark.parametrize("options", PROJECTED, ids=option_id)
@pytest.mark.parametrize("backend", FAST)
def test_projection_agrees_with_reference(backend: str, options: dict) -> None:
    case = Case("lstm", **options)
    assert_agree(case.outputs_and_gradients(backend), exact("lstm", **options), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "cell"), SERVED)
def test_layouts(backend: str, cell: str) -> None:
    for shape, pattern in paired(SHAPES, PATTERNS):
        case = Case(cell, shape=shape, pattern=pattern)
        assert_agree(case.outputs_and_gradients(backend), exact(cell, shape=shape, pattern=pattern), 1e-12)


@pytest.mark.parametrize(("backend", "cell"), [*SERVED, *(("reference", cell) for cell in KNOWN)])
def test_empty_batches(backend: str, cell: str) -> None:
    for shape in ((0,), (0, 4), (3, 0)):
        features, states = Case(cell, shape=shape, layers=2).run(backend)
        assert features.shape == (0, 7)
        assert [state.shape[:2] for state in states] == [(0, 2)] * len(states)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_reference_is_torch_nn(cell: str) -> None:
    """The reference itself is checked against torch.nn, with one row and without resets."""
    for options in [*OPTIONS, *(PROJECTED if cell == "lstm" else [])]:
        if "dropout" in options:
            continue
        case = Case(cell, shape=(6,), pattern="none", **options)
        directions, projection = case.directions, case.projection
        options = {"proj_size": projection} if projection else {}
        module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell](
            5, 7, case.layers, bias=case.bias, bidirectional=directions == 2, dtype=torch.float64, **options
        )
        flat = [w for layer in case.weights for w in layer]
        named = {"weight_ih": "w_ih", "weight_hh": "w_hh", "bias_ih": "b_ih", "bias_hh": "b_hh", "weight_hr": "w_hr"}
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                kind, _, place = name.partition("_l")
                place, _, reverse = place.partition("_")
                source = flat[int(place) * directions + bool(reverse)]
                parameter.copy_(getattr(source, named[kind]))
        initial = tuple(state[0].unsqueeze(1).contiguous() for state in case.states)
        expected, final = module(case.x.unsqueeze(1), initial if cell == "lstm" else initial[0])
        features, states = case.run("reference")
        torch.testing.assert_close(features, expected.squeeze(1), rtol=1e-12, atol=1e-12)
        for state, end in zip(states, final if cell == "lstm" else (final,), strict=True):
            torch.testing.assert_close(state[-1], end.squeeze(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("backend", "cell", "options"),
    [
        *(
            (name, *problem)
            for name in ("loop", "cpu", "scan")
            for problem in (("lstm", {}), ("lstm", {"projection": 4}), ("gru", {"bias": False}))
        ),
        ("loop", "fastweights", {}),
        ("scan", "own_mingru", {"bias": False}),
    ],
)
def test_recomputing_gates_changes_nothing(backend: str, cell: str, options: dict) -> None:
    case = Case(cell, layers=2, **options)
    expected = case.outputs_and_gradients(backend)
    case.options = Options(recompute=True)
    assert_agree(case.outputs_and_gradients(backend), expected, 1e-13)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cell", [name for name, cell in KNOWN.items() if not (cell.takes_time or cell.derivatives)])
def test_a_loop_in_a_graph_reads_no_lengths(monkeypatch: pytest.MonkeyPatch, cell: str, recompute: bool) -> None:
    problems = [{"pattern": pattern} for pattern in PATTERNS]
    problems += [{"layers": 2, "directions": 2}, {"shape": (2, 3, 6)}, {"shape": (17,)}, {"shape": (4, 1)}]
    expected = [exact(cell, **problem) for problem in problems]

    def refuse(boundaries: Boundaries) -> None:
        raise AssertionError("a captured loop reads lengths")

    monkeypatch.setattr("recurl.recurrence.loop.is_captured", lambda value: True)
    monkeypatch.setattr(Boundaries, "host", refuse)
    for problem, wanted in zip(problems, expected, strict=True):
        case = Case(cell, options=Options(recompute=recompute), **problem)
        assert_agree(case.outputs_and_gradients("loop"), wanted, 1e-12)


class Passing(TorchDispatchMode):
    """Runs every operation as it is, like those of profilers and tracers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["loop", "scan"])
@pytest.mark.parametrize("cell", KNOWN)
def test_a_dispatch_mode_changes_nothing(cell: str, backend: str) -> None:
    expected = exact(cell, layers=2)
    for recompute in (False, True):
        case = Case(cell, layers=2, options=Options(recompute=recompute))
        with Passing():
            assert_agree(case.outputs_and_gradients(backend), expected, 1e-12)


@pytest.mark.parametrize("cell", KNOWN)
def test_loop_gives_the_state_after_every_token(cell: str) -> None:
    case = Case(cell, layers=2)
    _, dense = case.run("loop")
    _, expected = case.run("reference")
    for state, exact in zip(dense, expected, strict=True):
        torch.testing.assert_close(state, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_pad_gives_states_at_ends_and_zeros_elsewhere(cell: str) -> None:
    case = Case(cell, layers=2)
    _, states = case.run("pad")
    assert all((state[~case.boundaries.ends] == 0).all() for state in states)


@pytest.mark.parametrize(("backend", "cell"), DENSE)
def test_gradients_of_interior_states_flow(backend: str, cell: str) -> None:
    """A loss on the state after every token, as in a learner that refreshes stored states."""
    case = Case(cell)
    _, states = case.run(backend)
    grads = torch.autograd.grad(
        sum(state.square().sum() for state in states), list(case.parameters.values()), materialize_grads=True
    )
    _, states = case.run("reference")
    expected = torch.autograd.grad(
        sum(state.square().sum() for state in states), list(case.parameters.values()), materialize_grads=True
    )
    for grad, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("backend", "cell"), [*SERVED, *(("reference", cell) for cell in KNOWN)])
def test_stored_states_inside_segments_are_never_read(backend: str, cell: str) -> None:
    case = Case(cell, layers=2)
    clean = case.outputs_and_gradients(backend)
    with torch.no_grad():
        for state in case.states:
            state[~case.boundaries.starts] = float("nan")
    poisoned = case.outputs_and_gradients(backend)
    assert all(torch.equal(clean[name], poisoned[name]) for name in clean)
    inside = ~case.boundaries.starts
    assert all((clean[f"grad state{k}"][inside] == 0).all() for k in range(len(case.states)))


@pytest.mark.parametrize(("backend", "cell"), SERVED)
def test_flat_equals_rows(backend: str, cell: str) -> None:
    rows = Case(cell, shape=(4, 6))
    expected = rows.outputs_and_gradients(backend)
    flat = Case(cell, shape=(24,))
    flat.is_init = rows.boundaries.starts
    assert_agree(flat.outputs_and_gradients(backend), expected, 1e-13)


@pytest.mark.parametrize(("backend", "cell"), SERVED)
def test_splitting_a_segment_changes_nothing(backend: str, cell: str) -> None:
    """A segment cut at t, with the state after t - 1 stored at t, gives the features of the uncut segment."""
    case = Case(cell, shape=(10,), pattern="none")
    whole, _ = case.run("reference")
    case.is_init[4] = True
    _, after = case.run("reference")
    with torch.no_grad():
        for stored, state in zip(case.states, after, strict=True):
            stored[4] = state[3]
    torch.testing.assert_close(case.run(backend)[0], whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("backend", "cell"), SERVED)
def test_permuting_rows_permutes_outputs(backend: str, cell: str) -> None:
    case = Case(cell, shape=(5, 8))
    features, _ = case.run(backend)
    order = torch.tensor([3, 0, 4, 2, 1])
    tokens = (order.unsqueeze(1) * 8 + torch.arange(8)).reshape(-1)
    is_init = case.is_init[order]
    permuted, _ = run_stack(
        BACKENDS.choose(backend, Support(KNOWN[cell], torch.device("cpu"))),
        KNOWN[cell],
        case.weights,
        case.x[tokens],
        tuple(state[tokens] for state in case.states),
        Boundaries.from_is_init(is_init),
    )
    torch.testing.assert_close(permuted, features[tokens], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("backend", FAST)
def test_same_input_twice_is_bitwise_equal(backend: str) -> None:
    case = Case("lstm", layers=2, dtype=torch.float32)
    first, second = case.outputs_and_gradients(backend), case.outputs_and_gradients(backend)
    assert all(torch.equal(first[name], second[name]) for name in first)


LONG = {"layers": 2, "shape": (6, 40), "hidden": 16}


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "cell"), SERVED)
def test_float32_error_is_what_rounding_excuses(backend: str, cell: str) -> None:
    """Error against float64 over three cases is at most 2x (features) and 3x (gradients) what rounding allows.

    The cases are combined, since the rounding error of a small gradient in a single case depends on luck; more of them
    where the derivative jumps, as that of a ReLU.
    """
    error, allowed = Counter[str](), Counter[str]()
    for seed in range(12 if cell.startswith("gtrxl") else 3):
        exact, excused = exact_and_allowed(cell=cell, seed=seed, **LONG)
        single = Case(cell, dtype=torch.float32, seed=seed, **LONG)
        for name, value in single.outputs_and_gradients(backend).items():
            scale = exact[name].square().sum().item() + 1e-24
            error[name] += (value.double() - exact[name]).square().sum().item() / scale
            allowed[name] += excused[name] ** 2 / scale
    for name in error:
        limit = (3 if name.startswith("grad") else 2) ** 2
        assert error[name] <= limit * allowed[name] + 1e-24, name


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_noncontiguous_and_expanded_inputs(cell: str) -> None:
    case = Case(cell)
    expected, _ = case.run("reference")
    case.x = case.x.detach().t().contiguous().t()
    wide = torch.stack(case.states[:1] + case.states[:1], -1)
    case.states = (wide[..., 0], *case.states[1:])
    for backend in FAST:
        features, _ = case.run(backend)
        torch.testing.assert_close(features, expected, rtol=1e-12, atol=1e-12)
        features.sum().backward()  # an expanded incoming gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "cell", "projection"),
    [
        *(
            ("loop", *case)
            for case in (("lstm", 0), ("lstm", 1), ("gru", 0), ("fastweights", 0), ("gtrxl with a short window", 0))
        ),
        *(("scan", *case) for case in (("lstm", 1), ("gru", 0), ("fastweights", 0))),
        *(("reference", *case) for case in (("lstm", 0), ("gru", 0))),
    ],
)
def test_double_backward(backend: str, cell: str, projection: int) -> None:
    case = Case(cell, shape=(2, 3), hidden=2, inputs=2, projection=projection)
    parameters = list(case.parameters.values())

    def function(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features, states = case.run(backend)
        return (features, *states)

    assert torch.autograd.gradcheck(function, parameters)
    assert torch.autograd.gradgradcheck(function, parameters)


@pytest.mark.parametrize("cell", KNOWN)
def test_frozen_weights_get_no_gradient(cell: str) -> None:
    case = Case(cell)
    expected = case.outputs_and_gradients("reference")
    names = list(case.parameters)
    for kept in names:
        for name, parameter in case.parameters.items():
            parameter.requires_grad_(name == kept)
        features, _ = case.run("loop")
        assert features.requires_grad
        (gradient,) = torch.autograd.grad(features.sum(), [case.parameters[kept]])
        assert gradient.shape == expected[f"grad {kept}"].shape
        assert gradient.isfinite().all()


def test_saturated_gates_stay_finite() -> None:
    for cell, backend in itertools.product(("lstm", "gru"), FAST):
        case = Case(cell, dtype=torch.float32)
        with torch.no_grad():
            case.x.mul_(1e4)
        assert all(value.isfinite().all() for value in case.outputs_and_gradients(backend).values())


def test_unknown_backend() -> None:
    with pytest.raises(ArgumentError, match="must be one of auto, fastest, pad, loop"):
        BACKENDS.choose("cudnn", Support(LSTM, torch.device("cpu")))


def test_no_silent_fallback_under_compile() -> None:
    with pytest.raises(UnsupportedError, match=r"'reference' can't run this call.*use 'auto'"):
        BACKENDS.choose("reference", Support(LSTM, torch.device("cpu"), compiling=True))


def test_auto_and_fastest_on_cpu() -> None:
    support = Support(LSTM, torch.device("cpu"))
    assert BACKENDS.choose("auto", support).name == "pad"
    assert BACKENDS.choose("fastest", support).name in ("loop", "cpu")
