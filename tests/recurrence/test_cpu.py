from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache

import pytest
import torch

from recurl.core.errors import UnsupportedError
from recurl.native import library
from recurl.recurrence import (
    BACKENDS,
    CELLS,
    GRU,
    LSTM,
    Boundaries,
    Inputs,
    LayerCall,
    LayerWeights,
    Options,
    Support,
)
from recurl.recurrence.cpu import CpuKernels, instruction_sets
from recurl.recurrence.operation import arguments_of

from .contract import PATTERNS, Case, assert_agree, exact_and_allowed

CPU = torch.device("cpu")
SUPPORT = Support(LSTM, CPU)
OPTIONS = [
    {"cell": "lstm"},
    {"cell": "gru"},
    {"cell": "lstm", "layers": 2, "dropout": 0.3, "bias": False},
    {"cell": "gru", "layers": 2, "dropout": 0.3, "bias": False},
    {"cell": "lstm", "projection": 4},
    {"cell": "lstm", "projection": 3, "layers": 2, "directions": 2},
    {"cell": "gru", "directions": 2},
]


@cache
def reference(**arguments: object) -> dict[str, torch.Tensor]:
    """Results of the reference, which is slow and the same for every instruction set."""
    return Case(**arguments).outputs_and_gradients("reference")


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force each instruction set that this processor supports."""
    monkeypatch.setattr(BACKENDS.choose("cpu", SUPPORT).kernels, "instruction_set", request.param)
    return request.param


def needs(call: LayerCall, wanted: Collection[int]) -> Inputs[bool]:
    """Which gradients to compute: x is 0, the weights are 1 to 5, the states 6 and 7."""
    return Inputs.from_flat(call.cell, [k in wanted for k in range(6 + len(call.states))])


def random_call(
    cell_name: str, tokens: int = 900, hidden: int = 40, projection: int = 0, **changes: object
) -> LayerCall:
    cell, inputs = CELLS[cell_name], 8
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.5

    rows, output = cell.num_gates * hidden, projection or hidden
    w_hr = normal(projection, hidden) if projection else None
    weights = LayerWeights(normal(rows, inputs), normal(rows, output), normal(rows), normal(rows), w_hr)
    states = (normal(tokens, output), *(normal(tokens, hidden) for _ in cell.state_names[1:]))
    starts = torch.rand(tokens, generator=generator) < 0.1
    call = LayerCall(cell, weights, normal(tokens, inputs), states, Boundaries.from_is_init(starts))
    return replace(call, **changes)


def everything(call: LayerCall, keep: bool = True) -> dict[str, torch.Tensor]:
    """States after every token and the gradients of all inputs."""
    kernels = CpuKernels()
    after, saved = kernels.forward(call, keep)
    assert bool(saved) == keep
    grads = [torch.sin(torch.arange(state.numel()).reshape(state.shape) * 0.7 + call.x[:, :1]) for state in after]
    found = kernels.backward(call, after, saved, tuple(grads), needs(call, range(8))).flat
    named = {f"grad{k}": grad for k, grad in enumerate(found) if grad is not None}
    return {**named, **{f"after{k}": state for k, state in enumerate(after)}}


def test_is_built_where_the_tests_run() -> None:
    assert library.missing() is None
    assert instruction_sets()[0] == "portable"
    assert BACKENDS.choose("fastest", SUPPORT).name == "cpu"


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()))
def test_agrees_with_reference(isa: str, options: dict, pattern: str) -> None:
    for hidden in (1, 7, 33):
        arguments = {**options, "pattern": pattern, "hidden": hidden, "shape": (2, 9)}
        assert_agree(Case(**arguments).outputs_and_gradients("cpu"), reference(**arguments), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS[:2] + OPTIONS[4:5], ids=lambda options: options["cell"])
@pytest.mark.parametrize("hidden", [16, 23, 64])
def test_float32_error_is_what_rounding_excuses(isa: str, options: dict, hidden: int) -> None:
    """Error against float64 is at most 2x (features) and 3x (gradients) the error that rounding allows."""
    arguments = {**options, "shape": (6, 40), "hidden": hidden}
    exact, allowed = exact_and_allowed(**arguments)
    for name, value in Case(**arguments, dtype=torch.float32).outputs_and_gradients("cpu").items():
        error = (value.double() - exact[name]).norm().item()
        assert error <= (3 if name.startswith("grad") else 2) * allowed[name], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoid_and_tanh(isa: str, dtype: torch.dtype) -> None:
    """Without state or input, the gates of an LSTM are sigmoid and tanh of its bias."""
    values = torch.cat([torch.linspace(-80, 80, 4001), torch.logspace(-30, 2, 500), -torch.logspace(-30, 1.9, 500)])
    values = torch.cat([values, torch.tensor([0.0, 1e4, -1e4, torch.inf, -torch.inf])]).to(dtype)
    hidden = len(values)
    weights = LayerWeights(torch.zeros(4 * hidden, 1, dtype=dtype), torch.zeros(4 * hidden, 1, dtype=dtype),
                           values.repeat(4), None, torch.zeros(1, hidden, dtype=dtype))  # fmt: skip
    zeros = torch.zeros(1, 1, dtype=dtype)
    states = (zeros, torch.zeros(1, hidden, dtype=dtype))
    call = LayerCall(LSTM, weights, zeros, states, Boundaries.from_is_init(torch.ones(1, dtype=torch.bool)))
    i, _, g, _ = CpuKernels(isa).forward(call, True)[1][0][0].chunk(4)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(i.double(), values.double().sigmoid(), rtol=4 * eps, atol=1e-38)
    torch.testing.assert_close(g.double(), values.double().tanh(), rtol=4 * eps, atol=0)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_nan_of_the_input_is_not_hidden(isa: str, cell: str) -> None:
    """NaN at one token affects only its row, from there to the end of the segment."""
    call = random_call(cell, tokens=20, boundaries=Boundaries.from_is_init(torch.arange(20) % 5 == 0))
    call.x[7, 3] = torch.nan
    after, _ = CpuKernels(isa).forward(call, False)
    for state in after:
        assert state.isnan().all(1).nonzero().flatten().tolist() == [7, 8, 9]
        assert state.isnan().any(1).sum() == 3


@pytest.mark.parametrize("options", [("lstm", 0), ("lstm", 24), ("gru", 0)], ids=str)
def test_same_bits_for_any_number_of_threads(isa: str, options: tuple[str, int]) -> None:
    call = random_call(options[0], projection=options[1])
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(everything(call))
    for other in results[1:]:
        assert all(torch.equal(value, other[name]) for name, value in results[0].items())


@pytest.mark.parametrize("options", [("lstm", 0), ("lstm", 24), ("gru", 0)], ids=str)
def test_permuting_segments_permutes_bits(isa: str, options: tuple[str, int]) -> None:
    call = random_call(options[0], tokens=300, projection=options[1])
    segments = call.boundaries.split(torch.arange(300))
    order = torch.randperm(len(segments), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = torch.cat([segments[s] for s in order])
    permuted = replace(
        call,
        x=call.x[tokens],
        states=tuple(state[tokens] for state in call.states),
        boundaries=Boundaries.from_is_init(call.boundaries.starts[tokens]),
    )
    kernels = CpuKernels()
    after, expected = kernels.forward(permuted, False)[0], kernels.forward(call, False)[0]
    assert all(torch.equal(state, other[tokens]) for state, other in zip(after, expected, strict=True))
    grads = tuple(state.cos() for state in expected)
    wanted = needs(call, (0, 6, 7))
    straight = kernels.backward(call, expected, (), grads, wanted).flat
    shuffled = kernels.backward(permuted, after, (), tuple(grad[tokens] for grad in grads), wanted).flat
    for grad, other in zip(shuffled, straight, strict=True):
        assert grad is None or torch.equal(grad, other[tokens])


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_segment_alone_has_the_bits_it_has_in_a_batch(isa: str, cell: str) -> None:
    call = random_call(cell, tokens=200)
    after, _ = CpuKernels().forward(call, False)
    for segment in call.boundaries.split(torch.arange(200)):
        alone = replace(
            call,
            x=call.x[segment],
            states=tuple(state[segment] for state in call.states),
            boundaries=Boundaries.from_is_init(torch.zeros(len(segment), dtype=torch.bool)),
        )
        for state, whole in zip(CpuKernels().forward(alone, False)[0], after, strict=True):
            assert torch.equal(state, whole[segment])


@pytest.mark.parametrize("options", [("lstm", 0), ("lstm", 24), ("gru", 0)], ids=str)
def test_recomputed_gates_have_the_same_bits(isa: str, options: tuple[str, int]) -> None:
    call = random_call(options[0], projection=options[1])
    kept, again = everything(call, keep=True), everything(call, keep=False)
    assert all(torch.equal(value, again[name]) for name, value in kept.items())


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_recompute_through_autograd(isa: str, cell: str) -> None:
    case = Case(cell, hidden=9)
    expected = case.outputs_and_gradients("reference")
    backend = BACKENDS.choose("cpu", SUPPORT)
    call = LayerCall(
        CELLS[cell],
        case.weights[0][0],
        case.x,
        tuple(state[:, 0] for state in case.states),
        case.boundaries,
        Options(recompute=True),
    )
    features, after = backend.run(call)
    saved = features.grad_fn.saved_tensors
    assert len(saved) == 6 + 2 * len(after), "x, five weights, states before and after; no gates"
    torch.testing.assert_close(features, expected["features"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_stored_states_inside_segments_are_never_read(isa: str, cell: str) -> None:
    call = random_call(cell)
    clean = everything(call)
    for state in call.states:
        state[~call.boundaries.starts] = torch.nan
    poisoned = everything(call)
    assert all(torch.equal(value, poisoned[name]) for name, value in clean.items())


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_strided_and_expanded_tensors_are_read_in_place_or_copied(isa: str, cell: str) -> None:
    call = random_call(cell, tokens=50)
    expected = everything(call)
    for layout in (
        lambda t: torch.stack([t, t], 1)[:, 1],  # row stride
        lambda t: t.t().contiguous().t(),  # column stride
        lambda t: torch.stack([t, t], -1)[..., 0],
    ):
        strided = replace(call, x=layout(call.x), states=tuple(layout(state) for state in call.states))
        found = everything(strided)
        assert all(torch.equal(value, found[name]) for name, value in expected.items())
    kernels = CpuKernels()
    after, saved = kernels.forward(call, True)
    wanted = needs(call, (0, 1, 2, 3, 4, 6, 7))
    ones = [torch.ones(()).expand_as(state) for state in after]
    expanded = kernels.backward(call, after, saved, tuple(ones), wanted).flat
    dense = kernels.backward(call, after, saved, tuple(one.contiguous() for one in ones), wanted).flat
    assert all(one is None or torch.equal(one, other) for one, other in zip(expanded, dense, strict=True))


def test_only_wanted_gradients_are_computed() -> None:
    call = random_call("lstm", tokens=30, projection=5)
    kernels = CpuKernels()
    after, saved = kernels.forward(call, True)
    grads = tuple(torch.ones_like(state) for state in after)
    everything = kernels.backward(call, after, saved, grads, needs(call, range(8))).flat
    for wanted in range(8):
        found = kernels.backward(call, after, saved, grads, needs(call, [wanted])).flat
        assert [k for k, gradient in enumerate(found) if gradient is not None] == [wanted]
        assert torch.equal(found[wanted], everything[wanted])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_low_precision_is_computed_in_float32(cell: str, dtype: torch.dtype) -> None:
    case, exact = (Case(cell, dtype=d, hidden=16, layers=2) for d in (dtype, torch.float64))
    with torch.no_grad():
        for name, parameter in exact.parameters.items():
            parameter.copy_(case.parameters[name])
    found = case.outputs_and_gradients("cpu")
    assert all(value.dtype == dtype for value in found.values())
    assert_agree(found, exact.outputs_and_gradients("reference"), 4 * torch.finfo(dtype).eps)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "projection"), [("lstm", 0), ("lstm", 3), ("gru", 0)])
def test_operator(cell: str, projection: int) -> None:
    case = Case(cell, shape=(6,), hidden=5, projection=projection, dtype=torch.float32)
    states = tuple(state[:, 0].detach().requires_grad_() for state in case.states)
    call = LayerCall(CELLS[cell], case.weights[0][0], case.x, states, case.boundaries)
    torch.library.opcheck(torch.ops.recurl.cpu_forward.default, (*arguments_of(call), True))


def test_no_second_derivatives() -> None:
    case = Case("gru")
    features, _ = case.run("cpu")
    with pytest.raises(UnsupportedError, match=r"'cpu' has no second derivatives.*recurrent_backend='loop'"):
        torch.autograd.grad(features.sum(), case.x, create_graph=True)


def test_other_devices_and_dtypes_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"'cpu' can't run this call: its tensors must be on the CPU.*cuda.*'loop'"
    ):
        BACKENDS.choose("cpu", Support(GRU, torch.device("cuda")))
    with pytest.raises(
        UnsupportedError, match=r"'cpu' can't run this call: it has no kernels for torch.int64; use 'loop'"
    ):
        BACKENDS.choose("cpu", Support(GRU, CPU, dtype=torch.int64))
