from __future__ import annotations

import pytest
import torch

from recurl.recurrence import CELLS, step_stack
from recurl.recurrence.cpu import instruction_sets
from recurl.recurrence.cpu import step as cpu_step

from .contract import Case

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hidden", [1, 7, 16, 33])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_step_without_gradients_is_that_of_the_definition(
    cell: str, hidden: int, bias: bool, dtype: torch.dtype
) -> None:
    case = Case(cell, layers=2, hidden=hidden, bias=bias, shape=(5,), dtype=dtype)
    weights = case.weights[0][0]
    assert not cpu_step.can_step(weights, case.x)  # gradients are wanted
    arguments = (CELLS[cell], case.weights, case.x, case.states)
    with torch.no_grad():
        assert cpu_step.can_step(weights, case.x)
        features, after = step_stack(*arguments)
        expected, expected_after = step_stack(*arguments, fused=False)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(features, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(after, expected_after, rtol=tolerance, atol=tolerance)


def test_states_with_any_strides() -> None:
    case = Case("lstm", layers=1, shape=(6,))
    arguments = (CELLS["lstm"], case.weights, case.x)
    strided = tuple(state.detach().transpose(1, 2).contiguous().transpose(1, 2) for state in case.states)
    odd = tuple(torch.stack([state, state], -1)[..., 0] for state in strided)
    with torch.no_grad():
        expected = step_stack(*arguments, case.states)
        for states in (strided, odd):
            torch.testing.assert_close(step_stack(*arguments, states), expected)


def test_saturated_gates_and_no_rows() -> None:
    for name in ("lstm", "gru"):
        case = Case(name, shape=(3,), dtype=torch.float32)
        with torch.no_grad():
            case.x.mul_(1e5)
            features, _ = step_stack(CELLS[name], case.weights, case.x, case.states)
            assert features.isfinite().all()
            empty = step_stack(CELLS[name], case.weights, case.x[:0], tuple(s[:0] for s in case.states))
            assert empty[0].shape == (0, 7)


def test_what_the_library_does_not_serve() -> None:
    projected = Case("lstm", projection=3, shape=(2,))
    with torch.no_grad():
        assert not cpu_step.can_step(projected.weights[0][0], projected.x)
        assert not cpu_step.can_step(Case("gru").weights[0][0], Case("gru").x.bfloat16())
        assert not cpu_step.can_step(Case("gru").weights[0][0], Case("gru").x.to("meta"))
