from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recurl.core.errors import ArgumentError
from recurl.recurrence.linear import reverse_linear_recurrence


def naive_recurrence(offset, coefficient):
    out, running = torch.empty_like(offset), torch.zeros_like(offset[..., 0])
    for t in reversed(range(offset.shape[-1])):
        running = offset[..., t] + (coefficient[..., t] * running if t < offset.shape[-1] - 1 else 0.0)
        out[..., t] = running
    return out


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 3), st.integers(0, 70), st.floats(0, 1), st.integers(0, 1000))
def test_recurrence_equals_the_loop(rows, length, cut, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, length) if rows else (length,)
    offset = torch.randn(shape, dtype=torch.float64, generator=generator)
    coefficient = torch.rand(shape, dtype=torch.float64, generator=generator)
    coefficient[torch.rand(shape, generator=generator) < cut] = 0.0
    expected = naive_recurrence(offset, coefficient) if length else offset
    torch.testing.assert_close(reverse_linear_recurrence(offset, coefficient), expected, rtol=1e-12, atol=1e-12)


def test_last_coefficient_is_not_used():
    offset = torch.ones(4)
    poisoned = torch.tensor([0.5, 0.5, 0.5, 3.0])
    torch.testing.assert_close(reverse_linear_recurrence(offset, poisoned), torch.tensor([1.875, 1.75, 1.5, 1.0]))


def test_recurrence_is_differentiable():
    offset, coefficient = (torch.rand(2, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(reverse_linear_recurrence, (offset, coefficient))


def test_recurrence_shapes_must_agree():
    with pytest.raises(ArgumentError, match="same shape"):
        reverse_linear_recurrence(torch.zeros(3), torch.zeros(4))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("length", [2, 7, 64, 100])
def test_nothing_passes_a_zero_coefficient(length, poison):
    offset, coefficient, weight = torch.randn(3, 5, length, dtype=torch.float64)
    coefficient[torch.rand(5, length) < 0.3] = 0.0
    cut = length // 2
    coefficient[:, cut - 1] = 0.0

    def run(offset, weight):
        offset, factor = offset.clone().requires_grad_(), coefficient.clone().requires_grad_()
        result = reverse_linear_recurrence(offset, factor)
        return result, *torch.autograd.grad(result, (offset, factor), weight)

    expected = run(offset, weight)
    for sick in (slice(cut, None), slice(None, cut)):
        poisoned, healthy = offset.clone(), torch.ones(length, dtype=torch.bool)
        healthy[sick] = False
        poisoned[:, sick] = poison
        wrong = weight.clone()
        wrong[:, sick] = poison
        for results in (run(poisoned, weight), run(offset, wrong)):
            for found, clean in zip(results, expected, strict=True):
                assert torch.equal(found[:, healthy], clean[:, healthy])
