"""Losses and estimators compiled by Inductor: equal to those of eager autograd, with the strides of the parameters."""

import pytest
import torch
from torch import nn

from recurl import execution
from recurl.core.errors import ArgumentError, RecurlWarning, UsageError
from recurl.execution import traced
from recurl.execution.inductor import InductorBatchFunction
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


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["gtrxl(window=4)", "slstm(conv_width=3)"])
def test_a_compiled_update_of_cells_that_torch_differentiates(cell):
    sizes = {"env": "recurl/MaskedCartPole-v1", "num_envs": 2, "rollout_steps": 16, "hidden_size": 8, "cell": cell}
    updated = []
    for compiled in (False, True):
        learner = PPO(PPOConfig(**sizes, total_steps=4096, minibatches=1, seed=1, compile=compiled))
        learner.learn(learner.collect())
        updated.append([parameter.detach().clone() for parameter in learner.agent.parameters()])
        learner.close()
    for one, other in zip(*updated, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class Weighted(LossModule):
    """A loss with options of several kinds."""

    in_keys = out_keys = accepted_keys = ()

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0))
        self.weight, self._power, self.offset, self.names = 2.0, 2, torch.zeros(()), ("loss",)
        self.calls = 0

    def losses(self, batch):
        self.calls += 1
        loss = ((self.net(batch.get("x")) - self.offset) ** self._power).mean() * self.weight
        return dict.fromkeys(self.names, loss)


def replace(net):
    net.net[0].weight = nn.Parameter(net.net[0].weight.detach() * 2)


CHANGES = {
    "public number": lambda net: setattr(net, "weight", 3.0),
    "private number": lambda net: setattr(net, "_power", 4),
    "tensor": lambda net: setattr(net, "offset", torch.ones(())),
    "tuple": lambda net: setattr(net, "names", ("loss", "again")),
    "parameter": replace,
    "frozen": lambda net: net.net[0].weight.requires_grad_(False),
    "module": lambda net: setattr(net, "net", nn.Linear(4, 3)),
    "hook": lambda net: net.net[0].register_forward_hook(lambda module, inputs, output: 2 * output),
    "number of a part": lambda net: setattr(net.net[1], "p", 1.0),
    "nothing": lambda net: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_loss_are_seen(change):
    torch.manual_seed(0)
    net, batch = Weighted(), Entries({"x": torch.randn(5, 4)}, torch.Size([5]))
    run = execution.compile(net.gradients, backend="inductor")
    run(batch)
    calls = net.calls
    CHANGES[change](net)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    found = run(batch), [parameter.grad for parameter in net.parameters()]
    assert run.explain() == {"inductor": None}
    assert (net.calls == calls) == (change == "nothing")
    torch.testing.assert_close(found, (net.gradients(batch), [parameter.grad for parameter in net.parameters()]))


@pytest.mark.parametrize("backend", ["inductor", "eager", "auto"])
def test_losses_without_gradients_are_refused(backend):
    net, batch = Weighted(), Entries({"x": torch.randn(5, 4)}, torch.Size([5]))
    run = execution.compile(net.gradients, backend=backend)
    words = r"must depend on a parameter that requires gradients, but none of \['loss'\] does"
    with torch.no_grad(), pytest.raises(UsageError, match=words):
        run(batch)
    net.requires_grad_(False)
    with pytest.raises(UsageError, match=words):
        run(batch)


def test_batches_of_the_same_entries_and_another_size():
    run = InductorBatchFunction(
        lambda batch: {"size": batch.get("x").sum() * len(batch.batch_size)}, nn.Module(), "sizes"
    )
    entries = {"x": torch.ones(2, 3)}
    assert [run(Entries(entries, torch.Size(size)))["size"].item() for size in ([2], [2, 3])] == [6.0, 12.0]


def test_where_the_compiler_fails_the_other_forms_run(monkeypatch):
    """Also for a loss that counts its calls, as if it had changed; it is not compiled again."""

    def fail(*given):
        tried.append(given)
        raise RuntimeError("PassManager::run failed")

    tried = []
    monkeypatch.setattr(traced, "inductor_program", fail)
    net, batch = Weighted(), Entries({"x": torch.randn(5, 4)}, torch.Size([5]))
    expected = net.gradients(batch), [parameter.grad for parameter in net.parameters()]
    run = execution.compile(net.gradients, backend="inductor")
    assert run.explain().form == "inductor"
    with pytest.warns(RecurlWarning, match="The compiler failed on the loss and its gradients"):
        run(batch)
    for _ in range(2):
        found = run(batch), [parameter.grad for parameter in net.parameters()]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(tried) == 2
    why = "not inductor: the compiler failed (RuntimeError: PassManager::run failed)"
    assert str(run.explain()) == f"gradients: eager ({why})"

    sizes = {"env": "recurl/MaskedCartPole-v1", "num_envs": 2, "rollout_steps": 16, "hidden_size": 8}
    learner = PPO(PPOConfig(**sizes, total_steps=4096, minibatches=1, compile=True, vectorization="sync"))
    for _ in range(2):  # the first update isn't compiled
        learner.learn(learner.collect())
    assert str(learner.gradients().explain()) == f"gradients: fused ({why})"
    learner.close()


def test_errors_of_a_loss_are_its_own(monkeypatch):
    class Faulty(Weighted):
        def losses(self, batch):
            raise ValueError("of the user")

    batch = Entries({"x": torch.randn(5, 4)}, torch.Size([5]))
    with pytest.raises(ValueError, match="of the user"):
        execution.compile(Faulty().gradients, backend="inductor")(batch)
