"""Losses and gradients as programs: those of plain autograd, laid out as the parameters are."""

import torch
from torch import nn

from recurl.lowering import Entries
from recurl.trainers.optim.programs import GradientProgram


class Turned(nn.Module):
    """Multiplies by a transposed parameter, whose gradient autograd lays out the other way round."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4))
        self.unused = nn.Parameter(torch.ones(2))

    def losses(self, batch):
        product = (batch.get("x").unsqueeze(-1) * self.weight.t()).sum((0, 1))
        return {"loss": (product**2).sum(), "mean": product.mean()}


def test_gradients_are_those_of_autograd_with_the_strides_of_the_parameters():
    net = Turned().double()
    batch = Entries({"x": torch.randn(5, 4, dtype=torch.float64)}, torch.Size([5]))
    program = GradientProgram(net.losses, ["loss"], net)
    found = program(batch)
    expected = net.losses(batch)
    (gradient,) = torch.autograd.grad(expected["loss"], [net.weight])
    torch.testing.assert_close(found["mean"], expected["mean"].detach())
    torch.testing.assert_close(net.weight.grad, gradient)
    assert gradient.stride() != net.weight.stride()
    assert net.weight.grad.stride() == net.weight.stride()
    assert net.unused.grad is None
    assert set(found) == {"loss", "mean"}
