import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recurl.objectives.surrogate import DISTANCES, Surrogate, SurrogateInputs

OPTIONS = [("l2", 0.0), ("l1", 0.3), ("smooth_l1", 0.0), ("smooth_l1", 0.3)]


def make(distance, clip_value, mask):
    torch.manual_seed(0)
    x = torch.randn(6, 3, 8, dtype=torch.float64)
    old_value = x[5] if clip_value else None
    data = SurrogateInputs(x[0], x[1], x[2], old_value, torch.rand(3, 8) < 0.6 if mask else None)
    return Surrogate(0.2, clip_value, distance), data, (x[0] + 0.3 * x[3]).requires_grad_(), x[4].requires_grad_()


def derivatives(surrogate, data, log_prob, value):
    """Return the derivatives of ``3 * gain + 2 * distance``, worked out by hand."""
    mask = torch.ones(3, 8, dtype=torch.bool) if data.mask is None else data.mask
    ratio, difference = (log_prob - data.log_prob).exp(), value - data.target
    clipped = ((ratio > 1.2) & (data.advantage > 0)) | ((ratio < 0.8) & (data.advantage < 0))
    by_log_prob = torch.where(clipped | ~mask, 0.0, ratio * data.advantage)
    slopes = {"l2": 2 * difference, "l1": difference.sign(), "smooth_l1": difference.clamp(-1, 1)}
    by_value = torch.where(mask, slopes[surrogate.distance], 0.0)
    if data.old_value is not None:
        near = data.old_value + (value - data.old_value).clamp(-surrogate.clip_value, surrogate.clip_value)
        flat = (near != value) & ((near - data.target).abs() > difference.abs())
        by_value = torch.where(flat, 0.0, by_value)
    return 3 * by_log_prob / mask.sum(), 2 * by_value / mask.sum()


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("distance", "clip_value"), OPTIONS)
def test_derivatives_are_those_worked_out_by_hand(distance, clip_value, mask):
    surrogate, data, log_prob, value = make(distance, clip_value, mask)
    terms = surrogate(log_prob, value, data)
    assert not terms.ratio.requires_grad
    found = torch.autograd.grad(3 * terms.gain + 2 * terms.distance, (log_prob, value))
    assert found[0].count_nonzero() < 24, "nothing is clipped"
    with torch.no_grad():
        expected = derivatives(surrogate, data, log_prob, value)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_one_loss_alone():
    surrogate, data, log_prob, value = make("l2", 0.0, False)
    terms = surrogate(log_prob, value, data)
    assert torch.autograd.grad(terms.gain, (log_prob, value), allow_unused=True, retain_graph=True)[1] is None
    assert torch.autograd.grad(terms.distance, (log_prob, value), allow_unused=True)[0] is None
    assert not surrogate(log_prob.detach(), value.detach(), data).gain.requires_grad


@pytest.mark.parametrize(("distance", "clip_value"), OPTIONS)
def test_second_derivatives(distance, clip_value):
    surrogate, data, log_prob, value = make(distance, clip_value, True)
    assert torch.autograd.gradgradcheck(lambda *x: surrogate(*x, data)[:2], (log_prob, value))
    (slope,) = torch.autograd.grad(surrogate(log_prob, value, data).gain, log_prob, create_graph=True)
    assert slope.requires_grad


@pytest.mark.slow
def test_torch_func_and_compile():
    surrogate, data, log_prob, value = make("l2", 0.0, False)

    def loss(log_prob, value):
        return sum(surrogate(log_prob, value, data)[:2])

    expected = torch.autograd.grad(loss(log_prob, value), (log_prob, value))
    for a, b in zip(torch.func.grad(loss, (0, 1))(log_prob.detach(), value.detach()), expected, strict=True):
        torch.testing.assert_close(a, b)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(log_prob, value), (log_prob, value)), expected, strict=True):
        torch.testing.assert_close(a, b)


@settings(deadline=None, max_examples=60)
@given(st.integers(-6, 6), st.integers(-6, 2), st.sampled_from(["l2", "l1", "smooth_l1"]), st.integers(0, 1000))
def test_values_inside_the_clip_range_keep_their_gradient(magnitude, bound, distance, seed):
    """Also if old + (value - old) is not the value, in float32, at every magnitude of values and bound."""
    generator = torch.Generator().manual_seed(seed)
    old, offset, target, ratio = (torch.randn(4, 200, generator=generator) * 10.0**magnitude).unbind()
    clip = torch.tensor(10.0**bound).item()
    value = torch.where(torch.rand(200, generator=generator) < 0.5, offset, old + clip * ratio.sign()).requires_grad_()
    data = SurrogateInputs(torch.zeros(200), torch.ones(200), target, old, None)
    surrogate = Surrogate(0.2, clip, distance)
    exact = value.detach().double().requires_grad_()
    inside = (exact - old.double()).abs() <= clip
    (expected,) = torch.autograd.grad(DISTANCES[distance](exact, target.double(), reduction="sum") / 200, exact)
    (found,) = torch.autograd.grad(surrogate(torch.zeros(200), value, data).distance, value)
    torch.testing.assert_close(found[inside], expected[inside].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("distance", ["l2", "l1", "smooth_l1"])
def test_a_clip_that_holds_every_value_changes_no_bit(distance, dtype):
    """``(value - old).abs() <= clip`` for all, although ``old + clip`` is rounded below some of them."""
    generator, zeros, ones = torch.Generator().manual_seed(0), torch.zeros(64, dtype=dtype), torch.ones(64, dtype=dtype)
    for _ in range(200):
        old, target, value = torch.randn(3, 64, generator=generator).to(dtype)
        clip = (value - old).abs().max().item()
        value.requires_grad_()
        free, clipped = Surrogate(0.2, 0.0, distance), Surrogate(0.2, clip, distance)
        data = SurrogateInputs(zeros, ones, target, None, None)
        expected = free(zeros, value, data).distance
        found = clipped(zeros, value, data._replace(old_value=old)).distance
        assert torch.equal(found, expected)
        gradients = (torch.autograd.grad(total, value, retain_graph=True)[0] for total in (found, expected))
        assert torch.equal(*gradients)


def test_a_stored_value_that_is_not_a_number_spoils_the_loss():
    surrogate, data, log_prob, value = make("l2", 0.3, False)
    data.old_value[0, 0] = torch.nan
    assert surrogate(log_prob, value, data).distance.isnan()


def test_ratios_inside_the_clip_range_keep_their_gradient():
    log_prob = (torch.randn(1000) * 0.2).requires_grad_()
    advantage = torch.randn(1000) * 10.0 ** torch.randint(-6, 6, (1000,))
    data = SurrogateInputs(torch.zeros(1000), advantage, torch.zeros(1000), None, None)
    surrogate = Surrogate(0.2, 0.0, "l2")
    ratio = log_prob.detach().double().exp()
    inside = (ratio - 1).abs() <= 0.2
    (found,) = torch.autograd.grad(surrogate(log_prob, torch.zeros(1000), data).gain, log_prob)
    torch.testing.assert_close(found[inside], (ratio * advantage / 1000)[inside].float())


def test_overflow_where_a_token_does_not_count():
    surrogate, data, log_prob, value = make("l2", 0.0, True)
    with torch.no_grad():
        log_prob[~data.mask] += 1e6
    gradients = torch.autograd.grad(sum(surrogate(log_prob, value, data)[:2]), (log_prob, value))
    assert all(gradient.isfinite().all() and gradient[~data.mask].count_nonzero() == 0 for gradient in gradients)
