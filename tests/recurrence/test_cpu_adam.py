import pytest
import torch
from torch import nn

from recurl.recurrence.cpu import instruction_sets
from recurl.recurrence.cpu.adam import CpuAdam

SHAPES = [(64, 5), (37,), (1, 3), ()]
OPTIONS = (0.1, (0.9, 0.999), 1e-5)


def zeros(dtype):
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


def made(dtype, instruction_set=None):
    """Return parameters and their optimizer."""
    torch.manual_seed(0)
    parameters = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    steps = [torch.zeros(()) for _ in SHAPES]
    return parameters, CpuAdam(parameters, zeros(dtype), zeros(dtype), steps, instruction_set)


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_equals_torch(instruction_set, dtype, tolerance, max_norm):
    parameters, adam = made(dtype, instruction_set)
    theirs = [nn.Parameter(parameter.to(torch.float64, copy=True)) for parameter in parameters]
    exact = torch.optim.Adam(theirs, lr=OPTIONS[0], betas=OPTIONS[1], eps=OPTIONS[2])
    for _ in range(5):
        grads = [torch.randn_like(parameter) for parameter in parameters]
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.to(torch.float64, copy=True)
        before = parameters[0]._version, grads[0]._version
        with torch.no_grad():
            assert adam.fits(grads, torch.ones((), dtype=dtype))
            norm = adam.step(grads, torch.ones((), dtype=dtype), max_norm, *OPTIONS)
        assert (parameters[0]._version, grads[0]._version) == (before[0] + 1, before[1] + 1)
        expected = nn.utils.clip_grad_norm_(theirs, max_norm)
        exact.step()
        torch.testing.assert_close(norm.double(), expected, rtol=tolerance, atol=0)
        for ours, other in zip([*parameters, *grads], [*theirs, *(p.grad for p in theirs)], strict=True):
            torch.testing.assert_close(ours.double(), other.detach(), rtol=10 * tolerance, atol=10 * tolerance)
    assert [step.item() for step in adam.steps] == [5.0] * len(SHAPES)


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize(("last", "loss"), [(torch.nan, 1.0), (torch.inf, 1.0), (1.0, torch.nan), (3e38, 1.0)])
def test_nothing_moves_where_a_number_is_not_finite(instruction_set, last, loss):
    parameters, adam = made(torch.float32, instruction_set)
    kept = [*parameters, *adam.means, *adam.squares, *adam.steps]
    before = [tensor.clone() for tensor in kept]
    grads = [torch.full_like(parameter, last) for parameter in parameters]
    with torch.no_grad():
        norm = adam.step(grads, torch.tensor(loss), 1.0, *OPTIONS)
    assert not (norm + loss).isfinite()
    assert all(map(torch.equal, kept, before))


def test_what_does_not_fit():
    parameters, adam = made(torch.float32)
    grads, loss = [torch.ones_like(parameter) for parameter in parameters], torch.tensor(1.0)
    assert not adam.fits(grads, loss)  # autograd is recording
    with torch.no_grad():
        assert adam.fits(grads, loss)
        assert not adam.fits(grads, loss.double())
        assert not adam.fits([grads[0].T.contiguous().T, *grads[1:]], loss)
        assert not adam.fits([grads[0].double(), *grads[1:]], loss)
        assert not CpuAdam(parameters, zeros(torch.float64), zeros(torch.float32), adam.steps).fits(grads, loss)
        assert not adam.fits([grads[0][:1].contiguous(), *grads[1:]], loss)
        kept, parameters[0].data = parameters[0].data, torch.ones(1)  # smaller than its optimizer state
        assert not adam.fits([torch.ones(1), *grads[1:]], loss)
        parameters[0].data = kept
        half = [parameter.bfloat16() for parameter in parameters]
        assert not CpuAdam(half, half, half, adam.steps).fits(half, loss.bfloat16())
