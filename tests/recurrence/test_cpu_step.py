from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from recurl.native.library import can_call
from recurl.recurrence import CELLS, LayerWeights, step_stack
from recurl.recurrence.cpu import INSTRUCTION_SETS, instruction_sets
from recurl.recurrence.cpu import step as cpu_step

from .contract import Case

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")

OPTIONS = [
    {"cell": "lstm", "hidden": 7},
    {"cell": "gru", "hidden": 7},
    {"cell": "lstm", "hidden": 33, "layers": 3, "bias": False, "inputs": 1},
    {"cell": "gru", "hidden": 33, "layers": 3, "bias": False, "inputs": 40},
    {"cell": "lstm", "hidden": 16, "projection": 9, "layers": 2, "inputs": 17},
    {"cell": "lstm", "hidden": 1},
    {"cell": "gru", "hidden": 1, "layers": 2},
]
ROWS = [1, 2, 3, 4, 5, 9, 17, 40, 64, 75, 137]


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make each supported instruction set appear to be the fastest."""
    known = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(request.param) + 1]
    monkeypatch.setattr(cpu_step, "instruction_sets", lambda: known)
    return request.param


def both(case: Case, is_init: torch.Tensor | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return features and states after the step, from the library and from the definition."""
    arguments = (CELLS[case.cell], case.weights, case.x, case.states)
    with torch.no_grad():
        assert can_call()
        result = cpu_step.step(*arguments, is_init)
        assert result is not None
        features, after = result
        expected, expected_after = step_stack(*arguments, fused=False, is_init=is_init)
    return [features, *after], [expected, *expected_after]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_step_is_that_of_the_definition(isa: str, options: dict[str, object], rows: int) -> None:
    is_init = torch.arange(rows) % 3 == 0
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 2e-6)):
        case = Case(**options, shape=(rows,), dtype=dtype)
        for flags in (None, is_init, is_init.unsqueeze(1)):
            for found, expected in zip(*both(case, flags), strict=True):
                assert (found - expected).norm() <= tolerance * expected.norm()
                assert found.is_contiguous()


@pytest.mark.parametrize("rows", [3, 30])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_states_of_zero_given_and_not_given(cell: str, rows: int) -> None:
    case = Case(cell, layers=2, shape=(rows,))
    with torch.no_grad():
        case.states = tuple(torch.full_like(state, torch.nan) for state in case.states)
        everywhere = both(case, torch.ones(rows, dtype=torch.bool))
        without = step_stack(CELLS[cell], case.weights, case.x, None, shapes=[state.shape[2:] for state in case.states])
        case.states = tuple(torch.zeros_like(state) for state in case.states)
        zeros = both(case)
    torch.testing.assert_close(everywhere[0], zeros[0], rtol=0, atol=0)
    torch.testing.assert_close([without[0], *without[1]], zeros[0], rtol=0, atol=0)
    torch.testing.assert_close(everywhere[1], zeros[1], rtol=0, atol=0)


@pytest.mark.parametrize("rows", [6, 20])
def test_inputs_with_any_strides(rows: int) -> None:
    case = Case("lstm", layers=2, shape=(rows,))
    flags = torch.arange(rows * 2).unsqueeze(1) % 3 == 0
    expected, _ = both(case, flags[::2].clone())
    with torch.no_grad():
        case.states = tuple(torch.stack([state, state], -1)[..., 0] for state in case.states)
        case.x = torch.cat([case.x, case.x], 1).t().contiguous().t()[:, : case.x.shape[1]]
        torch.testing.assert_close(both(case, flags[::2])[0], expected, rtol=0, atol=0)
        case.states = tuple(state.expand(2, *state.shape)[0] for state in case.states)
        case.x = torch.stack([case.x, case.x])[1]
        torch.testing.assert_close(both(case, flags[::2])[0], expected, rtol=0, atol=0)


def test_an_edit_of_the_weights_counts_at_once() -> None:
    case = Case("gru", shape=(3,))
    weights = case.weights[0][0]
    with torch.no_grad():
        for edit in (
            lambda: weights.w_hh.add_(0.1),
            lambda: weights.w_ih.data.mul_(0.5),
            lambda: setattr(weights.w_ih, "data", torch.randn_like(weights.w_ih)),
            lambda: weights.b_hh.numpy().fill(0.3),
        ):
            before = both(case)[0][0]
            edit()
            found, expected = both(case)
            assert not torch.equal(found[0], before)
            torch.testing.assert_close(found, expected)


def test_results_share_no_memory() -> None:
    case = Case("lstm", shape=(3,))
    found, expected = both(case)
    found[0].fill_(torch.nan)
    torch.testing.assert_close(found[1:], expected[1:])
    with torch.no_grad():
        features, after = step_stack(CELLS["lstm"], case.weights, case.x, case.states, fused=False)
        features.fill_(torch.nan)
    torch.testing.assert_close(list(after), expected[1:])


def test_threads_change_nothing() -> None:
    case = Case("lstm", layers=2, shape=(300,), hidden=40)
    results: list[list[torch.Tensor]] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(both(case)[0])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=0)


def test_out_of_memory_is_an_error() -> None:
    case = Case("gru", shape=(1,))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_step, "step_function", lambda: lambda *args: 1)
        with pytest.raises(MemoryError, match="could not allocate"):
            step_stack(CELLS["gru"], case.weights, case.x, case.states)


def test_saturated_gates_and_no_rows() -> None:
    for name in ("lstm", "gru"):
        case = Case(name, shape=(3,), dtype=torch.float32)
        with torch.no_grad():
            case.x.mul_(1e5)
            features, _ = step_stack(CELLS[name], case.weights, case.x, case.states)
            assert features.isfinite().all()
            empty = step_stack(CELLS[name], case.weights, case.x[:0], tuple(s[:0] for s in case.states))
            assert empty[0].shape == (0, 7)


def test_what_follows_operations_sees_them_all() -> None:
    assert not can_call()  # gradients are enabled
    case = Case("gru", shape=(2,))
    run = lambda x: step_stack(CELLS["gru"], case.weights, x, None, shapes=[(7,)])[0]  # noqa: E731 - used thrice
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            run(case.x)
        assert counter.get_total_flops() == 2 * 2 * 21 * (5 + 7)
        x = case.x.detach()
        traced = make_fx(run)(x)
        torch.testing.assert_close(traced(x + 1), run(x + 1))
        torch.testing.assert_close(torch.func.vmap(run)(x.unsqueeze(0))[0], run(x))
        with torch.device("meta"):  # device of tensors created without one
            assert run(x).device.type == "cpu"


def test_what_the_library_does_not_serve() -> None:
    case = Case("gru", shape=(2,))
    cell, (weights,) = CELLS["gru"], case.weights[0]
    turned = LayerWeights(weights.w_ih.t().contiguous().t(), weights.w_hh, weights.b_ih, weights.b_hh)
    arguments = (cell, case.weights, case.x, case.states, None)
    with torch.no_grad():
        assert cpu_step.step(*arguments) is not None
        for index, other in (
            (1, [[turned]]),
            (1, [[LayerWeights(weights.w_ih.float(), weights.w_hh)]]),
            (2, case.x.bfloat16()),
            (2, case.x.to("meta")),
            (2, case.x[:, :3]),
            (3, (case.states[0][:1],)),
            (3, (case.states[0].float(),)),
            (1, [[LayerWeights(weights.w_ih, weights.w_hh, weights.b_ih, None, torch.zeros(7, 7))]]),
            (1, [[LayerWeights(weights.w_ih, weights.w_hh[:, :5].contiguous())]]),
            (4, torch.zeros(2)),
            (4, torch.zeros(3, dtype=torch.bool)),
        ):
            assert cpu_step.step(*(other if i == index else value for i, value in enumerate(arguments))) is None
        features = step_stack(cell, [[turned]], case.x, case.states)[0]
        torch.testing.assert_close(features, step_stack(*arguments[:4])[0])
        with pytest.raises(RuntimeError, match="inconsistent input_size: got 3 expected 5"):
            step_stack(cell, case.weights, case.x[:, :3], case.states)
