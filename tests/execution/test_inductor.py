"""Losses and estimators compiled by Inductor: equal to those of eager autograd, with the strides of the parameters."""

import pytest
import torch
from torch import nn

from recurl import execution
from recurl.core.errors import ArgumentError
from recurl.execution.lowering import Entries
from recurl.objectives import LossModule, sequences
from recurl.trainers import PPO, PPOConfig


class Turned(LossModule):
    """Multiplies by a transposed parameter, for whose gradient autograd returns transposed strides."""

    in_keys = out_keys = accepted_keys = ()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4))
        self.unused = nn.Parameter(torch.ones(2))

    def losses(self, batch):
        product = (batch.get("x").unsqueeze(-1) * self.weight.t()).sum((0, 1))
        return {"loss": (product**2).sum(), "mean": product.mean().detach()}


@pytest.mark.parametrize("backend", ["inductor", "eager", "auto"])
def test_gradients_are_those_of_autograd_with_the_strides_of_the_parameters(backend):
    net = Turned().double()
    batch = Entries({"x": torch.randn(5, 4, dtype=torch.float64)}, torch.Size([5]))
    expected = net.tensors(batch)
    (gradient,) = torch.autograd.grad(expected["loss"], [net.weight])
    found = execution.compile(net.gradients, backend=backend)(batch)
    torch.testing.assert_close(found, {name: value.detach() for name, value in expected.items()})
    assert not any(value.requires_grad for value in found.values())
    torch.testing.assert_close(net.weight.grad, gradient)
    assert gradient.stride() != net.weight.stride()
    assert net.weight.grad.stride() == net.weight.stride()
    assert net.unused.grad is None


def test_what_has_no_form_is_refused():
    with pytest.raises(ArgumentError, match="has no form for Inductor"):
        execution.compile(Turned().losses, backend="inductor")
    with pytest.raises(ArgumentError, match="backend must be"):
        execution.compile(Turned().gradients, backend="fast")


def test_compiled_estimates_are_those_of_the_estimator(monkeypatch):
    """As on a GPU, where counting the ends of sequences would need synchronization."""
    monkeypatch.setattr(sequences, "_GATHERED_ON", ())
    sizes = {"env": "recurl/MaskedCartPole-v1", "num_envs": 2, "rollout_steps": 16, "hidden_size": 8}
    learner = PPO(PPOConfig(**sizes, total_steps=4096, minibatches=1, compile=True))
    batch = learner.collect()
    results = execution.compile(learner.estimator.results, backend="inductor")
    found, expected = results(batch), learner.estimator(batch.clone())
    assert results.explain().form == learner._results.explain().form == "inductor"
    learner.close()
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(found[key], expected[key].squeeze(-1))
