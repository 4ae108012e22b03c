from __future__ import annotations

import pytest
import torch

from recurl.core.errors import ArgumentError
from recurl.sequences.returns import (
    generalized_advantage_estimate,
    inverse_value_rescaling,
    lambda_return,
    n_step_return,
    value_rescaling,
    vtrace_advantage_estimate,
)


def test_worked_by_hand():
    """gamma 0.5, lambda 0.5: a terminated episode of two steps, then two truncated ones."""
    value = torch.tensor([1.0, 2.0, 3.0, 4.0])
    next_value = torch.tensor([2.0, 100.0, 4.0, 8.0])
    reward = torch.tensor([1.0, 1.0, 0.0, 2.0])
    terminated = torch.tensor([False, True, False, False])
    cut = torch.tensor([False, True, False, True])
    # delta: 1 + 1 - 1 = 1;  1 + 0 - 2 = -1;  0 + 2 - 3 = -1;  2 + 4 - 4 = 2
    advantage, target = generalized_advantage_estimate(0.5, 0.5, value, next_value, reward, terminated, cut)
    torch.testing.assert_close(advantage, torch.tensor([1 - 0.25, -1.0, -1 + 0.5, 2.0]))
    torch.testing.assert_close(target, torch.tensor([1.75, 1.0, 2.5, 6.0]))


def test_extremes_of_lambda():
    value, reward = torch.randn(6), torch.randn(6)
    next_value = torch.cat([value[1:], torch.randn(1)])
    no = torch.zeros(6, dtype=torch.bool)
    one_step, _ = generalized_advantage_estimate(0.9, 0.0, value, next_value, reward, no, no)
    torch.testing.assert_close(one_step, reward + 0.9 * next_value - value)
    _, target = generalized_advantage_estimate(0.9, 1.0, value, next_value, reward, no, no)
    discounts = 0.9 ** torch.arange(7)
    torch.testing.assert_close(target[0], (discounts * torch.cat([reward, next_value[-1:]])).sum())


def test_non_finite_value_after_termination_is_harmless():
    yes = torch.ones(1, dtype=torch.bool)
    advantage, _ = generalized_advantage_estimate(
        0.9, 0.9, torch.zeros(1), torch.full((1,), torch.nan), torch.ones(1), yes, yes
    )
    assert advantage.item() == 1.0


def test_n_step_return_against_a_loop():
    torch.manual_seed(0)
    reward, value = torch.randn(2, 3, 11, dtype=torch.float64)
    terminated, cut = torch.rand(2, 3, 11) < 0.2
    cut = cut | (torch.arange(11) == 10)
    for n in (1, 2, 5, 20):
        found = n_step_return(0.9, n, value, reward, terminated, cut)
        for row in range(3):
            for start in range(11):
                total, step = 0.0, start
                for step in range(start, 11):
                    total += 0.9 ** (step - start) * reward[row, step].item()
                    if terminated[row, step] or cut[row, step] or step - start + 1 == n:
                        break
                bootstrap = 0.0 if terminated[row, step] else value[row, step].item()
                total += 0.9 ** (step - start + 1) * bootstrap
                assert found[row, start].item() == pytest.approx(total)
    with pytest.raises(ArgumentError, match="n_steps must be at least 1"):
        n_step_return(0.9, 0, value, reward, terminated, cut)


@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.1])
def test_value_rescaling_is_the_published_formula_and_is_inverted(eps):
    x = torch.tensor([-1e4, -3.0, -1e-3, 0.0, 1e-6, 0.5, 200.0], dtype=torch.float64)
    scaled = value_rescaling(x, eps)
    torch.testing.assert_close(scaled, x.sign() * ((x.abs() + 1).sqrt() - 1) + eps * x)
    torch.testing.assert_close(inverse_value_rescaling(scaled, eps), x)
    torch.testing.assert_close(
        inverse_value_rescaling(value_rescaling(x.float(), eps), eps), x.float(), atol=1e-6, rtol=1e-4
    )
    y = x.clone().requires_grad_()
    value_rescaling(y, eps).sum().backward()
    torch.testing.assert_close(y.grad, 0.5 / (x.abs() + 1).sqrt() + eps)


POISONS = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("which", ["reward", "value", "next_value"])
def test_a_trajectory_reaches_no_other(which, poison):
    """Several consecutive episodes, terminated or truncated, and several rows of them."""
    ends = torch.rand(3, 40) < 0.2
    terminated, segments = ends & (torch.rand(3, 40) < 0.5), (ends.roll(1, -1) & (torch.arange(40) > 0)).cumsum(-1)
    clean = dict(zip(("reward", "value", "next_value"), torch.randn(3, 3, 40), strict=True))
    log_ratio = torch.randn(3, 40)

    def results(reward, value, next_value):
        inputs = [tensor.clone().requires_grad_() for tensor in (value, next_value, reward)]
        outputs = [
            *generalized_advantage_estimate(0.9, 0.8, *inputs, terminated, ends),
            *generalized_advantage_estimate(0.9, 0.0, *inputs, terminated, ends),
            *generalized_advantage_estimate(0.0, 0.8, *inputs, terminated, ends),
            *(n_step_return(0.9, n, inputs[1], inputs[2], terminated, ends) for n in (1, 3, 50)),
            *(lambda_return(0.9, lmbda, inputs[1], inputs[2], terminated, ends) for lmbda in (0.0, 0.8, 1.0)),
            *vtrace_advantage_estimate(0.9, log_ratio, *inputs, terminated, ends),
            *vtrace_advantage_estimate(0.9, log_ratio, *inputs, terminated, ends, torch.inf, torch.inf),
        ]
        weights = [torch.where(sick, poison, 1.0) for _ in outputs]
        return *outputs, *torch.autograd.grad(outputs, inputs, weights)

    for segment in (0, 2):
        sick = torch.zeros(3, 40, dtype=torch.bool)
        expected = results(**clean)
        sick = segments == segment
        sick[1:] = False
        found = results(**{**clean, which: clean[which].masked_fill(sick, poison)})
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours[~sick], theirs[~sick])


@pytest.mark.parametrize("poison", POISONS)
def test_no_value_is_read_where_a_step_terminated(poison):
    terminated = torch.rand(3, 40) < 0.3
    reward, value, next_value = torch.randn(3, 3, 40)
    sick = next_value.masked_fill(terminated, poison).requires_grad_()
    for function in (
        lambda following: generalized_advantage_estimate(0.9, 0.8, value, following, reward, terminated, terminated)[0],
        lambda following: n_step_return(0.9, 3, following, reward, terminated, terminated),
        lambda following: lambda_return(0.9, 0.8, following, reward, terminated, terminated),
        lambda following: vtrace_advantage_estimate(0.9, reward, value, following, reward, terminated, terminated)[1],
    ):
        assert torch.equal(function(sick), function(next_value))
        (gradient,) = torch.autograd.grad(function(sick).sum(), sick)
        assert gradient.isfinite().all()
        assert gradient[terminated].count_nonzero() == 0
