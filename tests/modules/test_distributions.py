from __future__ import annotations

import math

import pytest
import torch
from torch import distributions as d

from recurl.core.errors import ArgumentError
from recurl.modules.distributions import Categorical, NormalParamExtractor, OneHotCategorical, TanhNormal


def reference_tanh_normal(loc, scale, low, high):
    """Return the same distribution, composed of torch's parts."""
    half = (high - low) / 2
    transforms = [d.TanhTransform(cache_size=1), d.AffineTransform(low + half, half)]
    return d.Independent(d.TransformedDistribution(d.Normal(loc, scale), transforms, validate_args=False), 1)


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-2.0, 2.0), (0.0, 10.0)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_tanh_normal_log_prob_equals_torch(bounds, as_tensor):
    loc = torch.randn(6, 5, 3, dtype=torch.float64)
    scale = torch.rand(6, 5, 3, dtype=torch.float64) + 0.1
    low, high = (torch.tensor(b, dtype=torch.float64).expand(3) if as_tensor else b for b in bounds)
    dist = TanhNormal(loc, scale, low=low, high=high)
    value = dist.rsample()
    expected = reference_tanh_normal(loc, scale, *bounds).log_prob(value)
    torch.testing.assert_close(dist.log_prob(value), expected, rtol=1e-9, atol=1e-9)
    assert dist.log_prob(value).shape == (6, 5)
    assert (dist.batch_shape, dist.event_shape) == ((6, 5), (3,))


def test_tanh_normal_bounds_per_component():
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 5.0])
    dist = TanhNormal(torch.zeros(1000, 2), 3 * torch.ones(1000, 2), low=low, high=high)
    value = dist.sample()
    assert (value >= low).all()
    assert (value <= high).all()
    torch.testing.assert_close(dist.deterministic_sample[0], torch.tensor([0.0, 2.5]))


def test_entropy_of_tanh_normal_has_gradients_after_inference_mode():
    loc = torch.zeros(3, dtype=torch.float64)
    with torch.inference_mode():
        expected = TanhNormal(loc, torch.ones(3, dtype=torch.float64)).entropy()
    scale = torch.ones(3, dtype=torch.float64, requires_grad=True)
    entropy = TanhNormal(loc, scale).entropy()
    entropy.backward()
    assert entropy.item() == expected.item()
    assert scale.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_normal_is_finite_on_the_bounds(dtype):
    loc = torch.tensor([[30.0], [-30.0], [0.0]], dtype=dtype, requires_grad=True)
    scale = torch.tensor([[0.1], [5.0], [1.0]], dtype=dtype, requires_grad=True)
    dist = TanhNormal(loc, scale, low=-2.0, high=2.0)
    value = dist.rsample().detach()
    for x in (value, torch.full_like(value, 2.0), torch.full_like(value, -2.0), dist.deterministic_sample.detach()):
        log_prob = dist.log_prob(x)
        grads = torch.autograd.grad(log_prob.sum(), (loc, scale), retain_graph=True)
        assert log_prob.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads)
    assert dist.entropy().isfinite().all()


def test_tanh_normal_density_integrates_to_one():
    dist = TanhNormal(torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.8], dtype=torch.float64), low=0, high=3)
    x = torch.linspace(0, 3, 200_001, dtype=torch.float64)[1:-1]
    density = TanhNormal(dist.loc.expand(len(x), 1), dist.scale.expand(len(x), 1), low=0, high=3).log_prob(x[:, None])
    assert torch.trapezoid(density.exp(), x).item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("scale", "tolerance"), [(0.05, 1e-7), (0.5, 1e-7), (1.0, 1e-7), (2.0, 2e-4), (5.0, 3e-2)])
@pytest.mark.parametrize("loc", [-2.0, 0.0, 0.7])
def test_tanh_normal_entropy_equals_the_integral(loc, scale, tolerance):
    u = torch.linspace(loc - 12 * scale, loc + 12 * scale, 400_001, dtype=torch.float64)
    normal = d.Normal(torch.tensor(loc, dtype=torch.float64), scale)
    log_density = normal.log_prob(u) - 2 * (math.log(2) - u - torch.nn.functional.softplus(-2 * u)) - math.log(1.5)
    expected = -torch.trapezoid(normal.log_prob(u).exp() * log_density, u)
    dist = TanhNormal(
        torch.tensor([loc], dtype=torch.float64), torch.tensor([scale], dtype=torch.float64), low=-2, high=1
    )
    torch.testing.assert_close(dist.entropy(), expected, rtol=0, atol=tolerance)


def test_tanh_normal_rsample_carries_gradients():
    loc, scale = torch.zeros(4, 2, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    value = TanhNormal(loc, scale).rsample((3,))
    assert value.shape == (3, 4, 2)
    value.sum().backward()
    assert (loc.grad != 0).all()
    assert (scale.grad != 0).all()
    assert not TanhNormal(loc, scale).sample().requires_grad


def test_tanh_normal_location_can_be_bounded():
    dist = TanhNormal(torch.tensor([1000.0]), torch.ones(1), upscale=2.0, tanh_loc=True)
    assert dist.loc.item() == pytest.approx(2.0)
    assert dist.mode.item() == pytest.approx(math.tanh(2.0))


def test_tanh_normal_without_event_dims():
    dist = TanhNormal(torch.zeros(4, 2), torch.ones(4, 2), event_dims=0)
    assert dist.log_prob(dist.sample()).shape == (4, 2)
    assert dist.entropy().shape == (4, 2)


def test_tanh_normal_errors():
    with pytest.raises(ArgumentError, match="NormalParamExtractor"):
        TanhNormal(torch.zeros(1), None)
    with pytest.raises(ArgumentError, match=r"must broadcast to its location, \[3, 1\], got \[4, 1\].*unbatched"):
        TanhNormal(torch.zeros(3, 1), torch.ones(3, 1), high=torch.ones(4, 1))
    with pytest.raises(ArgumentError, match="low < high"):
        TanhNormal(torch.zeros(1), torch.ones(1), low=1.0, high=1.0)


@pytest.mark.parametrize("argument", ["logits", "probs"])
def test_categorical_equals_torch(argument):
    parameter = torch.rand(5, 4, 3, dtype=torch.float64) + 0.1
    dist, expected = Categorical(**{argument: parameter}), d.Categorical(**{argument: parameter})
    value = dist.sample()
    assert value.shape == (5, 4)
    assert value.dtype == torch.int64
    torch.testing.assert_close(dist.log_prob(value), expected.log_prob(value))
    torch.testing.assert_close(dist.entropy(), expected.entropy())
    assert torch.equal(dist.deterministic_sample, expected.mode)


@pytest.mark.parametrize("kind", [Categorical, OneHotCategorical])
@pytest.mark.parametrize("argument", ["logits", "probs"])
def test_mask_forbids_choices(kind, argument):
    parameter = torch.rand(200, 4) + 0.1
    mask = torch.rand(200, 4) > 0.5
    mask[:, 2] = True
    parameter.requires_grad_()
    dist = kind(**{argument: parameter}, mask=mask)
    for value in (dist.sample(), dist.deterministic_sample):
        index = value if kind is Categorical else value.argmax(-1)
        assert mask.gather(-1, index.unsqueeze(-1)).all()
        assert dist.log_prob(value).isfinite().all()
    allowed = d.Categorical(**{argument: parameter[0, mask[0]]})
    torch.testing.assert_close(dist.entropy()[0], allowed.entropy())
    (dist.entropy().sum() + dist.log_prob(dist.sample()).sum()).backward()
    assert parameter.grad.isfinite().all()
    assert (parameter.grad[~mask] == 0).all()


def test_forbidden_choice_has_no_probability():
    dist = Categorical(logits=torch.zeros(3), mask=torch.tensor([True, True, False]))
    assert dist.log_prob(torch.tensor(2)).item() == -math.inf
    torch.testing.assert_close(dist.probs, torch.tensor([0.5, 0.5, 0.0]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_one_hot_is_the_categorical_in_another_dress(dtype):
    logits = torch.randn(6, 3)
    dist = OneHotCategorical(logits=logits)
    value = dist.sample()
    assert value.shape == (6, 3)
    assert value.dtype == torch.int64
    assert (value.sum(-1) == 1).all()
    assert dist.sample((2,)).shape == (2, 6, 3)
    torch.testing.assert_close(dist.log_prob(value.to(dtype)), Categorical(logits=logits).log_prob(value.argmax(-1)))
    assert torch.equal(dist.mode.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("arguments", [{}, {"logits": torch.zeros(2), "probs": torch.ones(2)}])
def test_categorical_needs_one_parameter(arguments):
    with pytest.raises(ArgumentError, match="exactly one of logits and probs"):
        Categorical(**arguments)


def test_normal_param_extractor_splits_the_last_dimension():
    loc, scale = NormalParamExtractor()(torch.randn(5, 6))
    assert loc.shape == scale.shape == (5, 3)
    assert (scale > 0).all()


@pytest.mark.parametrize("shape", [(5,), (4, 3), (2, 3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_choices_are_those_of_multinomial(shape, dtype):
    logits = 3 * torch.randn(shape, dtype=dtype)
    dist = Categorical(logits=logits)
    torch.manual_seed(4)
    ours, after = dist.sample(), torch.rand(1)
    torch.manual_seed(4)
    assert torch.equal(ours, d.Categorical(logits=logits).sample())
    assert torch.equal(after, torch.rand(1))
    torch.testing.assert_close(dist.log_prob(ours), d.Categorical(logits=logits).log_prob(ours))
    assert dist.sample((6,)).shape == (6, *shape[:-1])


def test_choices_occur_as_often_as_they_are_probable():
    probs = torch.tensor([0.5, 0.3, 0.2, 0.0])
    choices = Categorical(probs=probs.expand(200_000, 4)).sample()
    share = choices.bincount(minlength=4) / len(choices)
    assert share[3] == 0
    torch.testing.assert_close(share, probs, rtol=0, atol=5e-3)  # 4.5 standard deviations


def test_a_log_prob_broadcasts_as_in_torch():
    logits = torch.randn(3, 4)
    value = torch.tensor([[1], [2]])
    expected = d.Categorical(logits=logits).log_prob(value)
    torch.testing.assert_close(Categorical(logits=logits).log_prob(value), expected)
    torch.testing.assert_close(Categorical(logits=logits).log_prob(value.int()), expected)


def test_a_choice_among_nan_is_refused():
    with pytest.raises(ArgumentError, match=r"got NaN in the distribution of \[2\] choices"):
        Categorical(logits=torch.tensor([[0.0, 1.0], [0.0, torch.nan]])).sample()


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("kind", [Categorical, OneHotCategorical])
def test_derivatives_of_log_prob_and_entropy_are_those_worked_out_by_hand(kind, masked):
    logits = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(5, 3, 4) < 0.7
    mask[..., 0] = True
    dist = kind(logits=logits, mask=mask if masked else None)
    value = dist.sample()
    log_prob, entropy = dist.log_prob_and_entropy(value)
    weights = torch.randn(2, 5, 3, dtype=torch.float64)
    found = torch.autograd.grad((weights[0] * log_prob + weights[1] * entropy).sum(), logits)[0]
    with torch.no_grad():
        probs = logits.masked_fill(~mask, -torch.inf).softmax(-1) if masked else logits.softmax(-1)
        chosen = value if kind is OneHotCategorical else torch.nn.functional.one_hot(value, 4)
        torch.testing.assert_close(log_prob, (probs * chosen).sum(-1).log())
        torch.testing.assert_close(entropy, -torch.xlogy(probs, probs).sum(-1))
        surprise = -torch.xlogy(probs, probs) - probs * entropy.unsqueeze(-1)
        expected = weights[0].unsqueeze(-1) * (chosen - probs) + weights[1].unsqueeze(-1) * surprise
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    if not masked:
        assert torch.autograd.gradgradcheck(lambda x: kind(logits=x).log_prob_and_entropy(value), logits)


def test_log_prob_and_entropy_of_probabilities_and_of_other_shapes():
    probs = torch.tensor([[0.25, 0.75]])
    log_prob, entropy = Categorical(probs=probs).log_prob_and_entropy(torch.tensor([1]))
    torch.testing.assert_close(log_prob, torch.tensor([0.75]).log())
    torch.testing.assert_close(entropy, -(probs * probs.log()).sum(-1))
    torch.testing.assert_close(Categorical(probs=probs).logits, probs.log())
    assert Categorical(logits=probs).log_prob_and_entropy(torch.zeros(3, 1, dtype=torch.int64))[0].shape == (3, 1)


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-2.0, 5.0)])
def test_a_sample_with_its_log_prob(bounds):
    """The log-density equals that of the value, and its gradient doesn't vanish for a value on a bound."""
    low, high = bounds
    loc = torch.tensor([[0.3, -0.2], [0.0, 9.0]], dtype=torch.float64, requires_grad=True)
    dist = TanhNormal(loc, torch.full_like(loc, 0.4), low=low, high=high)
    value, log_prob = dist.rsample_with_log_prob()
    torch.testing.assert_close(log_prob[0], dist.log_prob(value)[0], rtol=1e-8, atol=1e-8)
    assert dist.log_half_range.tolist() == pytest.approx([2 * math.log((high - low) / 2)] * 2)
    (gradient,) = torch.autograd.grad(log_prob.sum(), loc)
    assert gradient[1, 1].item() == pytest.approx(2.0, rel=1e-3)


def test_log_probs_of_all_choices():
    mask = torch.tensor([[True, False, True]])
    dist = Categorical(logits=torch.zeros(1, 3), mask=mask)
    assert dist.choice_counts == (3,)
    assert dist.choice_log_probs.tolist() == [[[pytest.approx(-math.log(2)), -math.inf, pytest.approx(-math.log(2))]]]
