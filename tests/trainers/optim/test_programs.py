"""Compiled losses and gradients: equal to those of eager autograd, with the strides of the parameters."""

import torch
from torch import nn

from recurl.execution.lowering import Entries
from recurl.objectives import sequences
from recurl.trainers import PPO, PPOConfig
from recurl.trainers.optim.programs import CompiledGradients


class Turned(nn.Module):
    """Multiplies by a transposed parameter, for whose gradient autograd returns transposed strides."""

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
    program = CompiledGradients(net.losses, ["loss"], net)
    found = program(batch)
    expected = net.losses(batch)
    (gradient,) = torch.autograd.grad(expected["loss"], [net.weight])
    torch.testing.assert_close(found["mean"], expected["mean"].detach())
    torch.testing.assert_close(net.weight.grad, gradient)
    assert gradient.stride() != net.weight.stride()
    assert net.weight.grad.stride() == net.weight.stride()
    assert net.unused.grad is None
    assert set(found) == {"loss", "mean"}


def test_an_estimate_as_a_program_is_the_estimate(monkeypatch):
    """As on a GPU, where counting the ends of sequences would need synchronization."""
    monkeypatch.setattr(sequences, "_GATHERED_ON", ())
    sizes = {"env": "recurl/MaskedCartPole-v1", "num_envs": 2, "rollout_steps": 16, "hidden_size": 8}
    learner = PPO(PPOConfig(**sizes, total_steps=4096, minibatches=1, compile=True))
    assert learner._estimate is not learner.estimator
    batch = learner.collect()
    plain = batch.clone()
    learner._estimate(batch)
    learner.estimator(plain)
    learner.close()
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(batch[key], plain[key])
