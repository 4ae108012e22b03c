"""Masked choices: exact zeros, gradients without NaN, and agreement with a distribution over the allowed choices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions as d

from recurl.core.errors import ArgumentError
from recurl.modules import IndependentCategorical, MaskedCategorical, MaskedOneHotCategorical


def case(seed, rows, n, scale, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(rows, n, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    mask = torch.rand(rows, n, generator=generator) < 0.5
    mask[torch.arange(rows), torch.randint(n, (rows,), generator=generator)] = True
    return logits, mask


def outputs(kind, logits, mask, value):
    dist = kind(logits=logits, mask=mask)
    together = dist.log_prob_and_entropy(value)
    torch.testing.assert_close(torch.stack(together), torch.stack([dist.log_prob(value), dist.entropy()]))
    return torch.stack(together)


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 9),
    scale=st.sampled_from([0.01, 1.0, 30.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equals_the_distribution_over_the_allowed_choices(seed, n, scale, dtype):
    logits, mask = case(seed, 6, n, scale, dtype)
    dist = MaskedCategorical(logits=logits, mask=mask)
    value = dist.sample()
    assert mask.gather(-1, value.unsqueeze(-1)).all()
    assert mask.gather(-1, dist.mode.unsqueeze(-1)).all()
    assert (dist.probs[~mask] == 0).all()
    assert (dist.log_prob(torch.arange(n).unsqueeze(-1).expand(n, 6)).T[~mask] == -torch.inf).all()
    found = outputs(MaskedCategorical, logits, mask, value)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert (gradient[~mask] == 0).all()
    assert gradient.isfinite().all()
    reference = logits.detach().double().requires_grad_()
    rows = [d.Categorical(logits=reference[i][mask[i]]) for i in range(6)]
    places = [int(mask[i, : value[i]].sum()) for i in range(6)]
    expected = torch.stack(
        [
            torch.stack([row.log_prob(torch.tensor(place)) for row, place in zip(rows, places, strict=True)]),
            torch.stack([row.entropy() for row in rows]),
        ]
    )
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found.double(), expected, **tolerance)
    (of_reference,) = torch.autograd.grad(expected.sum(), reference)
    torch.testing.assert_close(gradient.double(), of_reference, rtol=1e-3, atol=1e-3 if scale > 1 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8])
def test_masks_of_integers(dtype):
    logits, mask = case(0, 4, 5, 1.0, torch.float32)
    found = MaskedCategorical(logits=logits, mask=mask.to(dtype))
    assert torch.equal(found.probs, MaskedCategorical(logits=logits, mask=mask).probs)


def test_autocast():
    logits, mask = case(0, 4, 5, 1.0, torch.float32)
    net = torch.nn.Linear(5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        dist = MaskedCategorical(logits=net(logits), mask=mask)
        log_prob, entropy = dist.log_prob_and_entropy(dist.sample())
        loss = log_prob.sum() + entropy.sum() + dist.log_prob(dist.mode).sum() + dist.entropy().sum()
    loss.backward()
    assert (dist.probs[~mask] == 0).all()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("kind", [MaskedCategorical, MaskedOneHotCategorical])
def test_rows_without_a_choice_have_no_gradient_and_no_sample(kind):
    logits = torch.randn(3, 2, 4, requires_grad=True)
    mask = torch.ones(3, 2, 4, dtype=torch.bool)
    mask[1, 1] = mask[2, 0] = False
    dist = kind(logits=logits, mask=mask)
    log_prob, entropy = dist.log_prob_and_entropy(dist.mode)
    (log_prob.sum() + entropy.sum()).backward()
    assert log_prob.isfinite().all()
    assert logits.grad.isfinite().all()
    assert (logits.grad[1, 1] == 0).all()
    for draw in (dist.sample, lambda: dist.sample((2,))):
        with pytest.raises(ArgumentError, match=r"allows none in rows \[3, 4\]"):
            draw()


def test_a_forbidden_probability_of_zero_has_a_gradient():
    probs = torch.tensor([0.0, 0.5, 0.5], requires_grad=True)
    dist = MaskedCategorical(probs=probs, mask=torch.tensor([False, True, True]))
    (dist.log_prob(torch.tensor(1)) + dist.entropy()).backward()
    assert probs.grad.isfinite().all()


def test_invalid_arguments():
    with pytest.raises(ArgumentError, match="needs a mask"):
        MaskedCategorical(logits=torch.zeros(3), mask=None)
    with pytest.raises(ArgumentError, match=r"shape of the logits or probs, \[3\], got \[2\]"):
        MaskedCategorical(logits=torch.zeros(3), mask=torch.ones(2))
    with pytest.raises(ArgumentError, match=r"must end with 5 choices, for counts \(2, 3\), got \[4\]"):
        IndependentCategorical(torch.zeros(4), (2, 3))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 2**31), st.booleans())
def test_several_integers_are_independent(counts, seed, masked):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, sum(counts), generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(5, sum(counts), generator=generator) < 0.6
    for part in mask.split(counts, -1):
        part[:, 0] = True
    dist = IndependentCategorical(logits, counts, mask if masked else None)
    value = dist.sample()
    assert value.shape == (5, len(counts))
    parts = [
        MaskedCategorical(logits=part, mask=allowed if masked else torch.ones_like(allowed))
        for part, allowed in zip(logits.split(counts, -1), mask.split(counts, -1), strict=True)
    ]
    expected = sum(part.log_prob(value[:, i]) for i, part in enumerate(parts)), sum(part.entropy() for part in parts)
    for found in (dist.log_prob_and_entropy(value), (dist.log_prob(value), dist.entropy())):
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-12, atol=1e-12)
        ours, theirs = (
            torch.autograd.grad(torch.stack(x).sum(), logits, retain_graph=True)[0] for x in (found, expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.equal(dist.mode, torch.stack([part.mode for part in parts], -1))
