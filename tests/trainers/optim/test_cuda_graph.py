import copy
from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recurl.core.errors import ArgumentError, UsageError
from recurl.data import SequenceMinibatches
from recurl.execution.lowering import Entries, leaves
from recurl.trainers import ALGORITHMS, PPO, CudaGraphStep, PPOConfig
from recurl.trainers.checkpoint import load_checkpoint, save_checkpoint

pytestmark = (
    pytest.mark.tensordict_0_15
)  # tensordict 0.14 warns that TensorDicts are registered as a PyTree in torch, and unregisters them


class Net(nn.Module):
    """A parameter in a child module and a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.scale = nn.Buffer(torch.ones(3))

    def forward(self, x):
        return self.layer(x * self.scale)


def make(net=None):
    net = Net() if net is None else net
    lr = torch.tensor(0.1)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr, capturable=True, fused=True)

    def step(batch):
        loss = (net(batch.get(("in", "x"))) - batch.get("y")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), net.layer.weight.grad.norm()

    return net, optimizer, step


def batch(rows=4, kind=TensorDict, **more):
    torch.manual_seed(rows)
    tensordict = TensorDict({"in": {"x": torch.randn(rows, 3)}, "y": torch.randn(rows, 1), **more}, [rows])
    return Entries.of(tensordict) if kind is Entries else tensordict


@pytest.mark.parametrize("kind", [TensorDict, Entries])
def test_equals_the_eager_step(anywhere, kind):
    net, optimizer, step = make()
    eager_net, _, eager = make(copy.deepcopy(net))
    seen = []
    graphed = CudaGraphStep(lambda given: seen.append(given) or step(given), net, optimizer)
    for _ in range(6):
        data = batch(kind=kind)
        for got, expected in zip(graphed(data), eager(data), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
    for got, expected in zip(net.parameters(), eager_net.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert all(type(given) is kind and given.batch_size == (4,) for given in seen)
    assert [path for path, _ in leaves(seen[0])] == [("in", "x"), ("y",)]


@pytest.mark.parametrize("schedule", ["linear", "adaptive"])
def test_ppo_learns_the_same_in_captured_steps(anywhere, schedule):
    options = {"env": "recurl/RepeatPrevious-v0", "hidden_size": 8, "num_envs": 4, "rollout_steps": 32, "cell": "gru"}
    options |= {"learning_rate_schedule": schedule, "target_kl": 1e-4}
    config = PPOConfig(**options, total_steps=384, entropy_coeff=0.1)
    captured = copy.copy(config)
    object.__setattr__(captured, "cuda_graph", True)  # a config rejects this on a CPU
    seen = []
    for options in (config, captured):
        algorithm = PPO(options)
        seen.append([algorithm.learn(algorithm.collect()) for _ in range(3)])
        algorithm.close()
    for plain, graphed in zip(*seen, strict=True):
        assert graphed == pytest.approx(plain, rel=1e-3, abs=1e-5)
    rates = {row.get("learning_rate") for row in seen[1]}
    assert rates == {None} if schedule == "linear" else len(rates) > 1
    assert seen[0][0]["loss_entropy"] != pytest.approx(seen[0][1]["loss_entropy"], rel=0.1)  # annealed


@pytest.mark.full
def test_compiled_steps_learn_the_same(anywhere):
    options = {"env": "recurl/RepeatPrevious-v0", "hidden_size": 8, "num_envs": 4, "rollout_steps": 32}
    config = PPOConfig(**options, sequence_length=16, total_steps=384, entropy_coeff=0.1)
    seen = []
    for changes in ({}, {"compile": True}, {"compile": True, "cuda_graph": True}):
        varied = copy.copy(config)
        for name, value in changes.items():
            object.__setattr__(varied, name, value)  # a config rejects the graph on a CPU
        algorithm = PPO(varied)
        seen.append([algorithm.learn(algorithm.collect()) for _ in range(3)])
        algorithm.close()
    for plain, *others in zip(*seen, strict=True):
        for other in others:
            assert other == pytest.approx(plain, rel=1e-3, abs=1e-5)


def test_a_captured_run_goes_on_from_a_checkpoint(anywhere, tmp_path):
    config = PPOConfig(env="recurl/RepeatPrevious-v0", hidden_size=8, num_envs=4, rollout_steps=32, total_steps=384)
    object.__setattr__(config, "cuda_graph", True)  # a config rejects this on a CPU
    whole = PPO(config)
    whole.learn(whole.collect())
    path = save_checkpoint(tmp_path, 128, {"algorithm": whole.state_dict(), "rng": torch.get_rng_state()})
    expected = [whole.learn(whole.collect()) for _ in range(2)]
    whole.close()
    resumed = PPO(config)
    state = load_checkpoint(path)
    resumed.load_state_dict(state["algorithm"])
    torch.set_rng_state(state["rng"])
    assert [resumed.learn(resumed.collect()) for _ in range(2)] == expected
    resumed.close()


class NeverWaits(TorchDispatchMode):
    """Rejects operations that can't be captured: reads of values by Python, and data-dependent shapes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
        )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("env", ["Pendulum-v1", "CartPole-v1"])
def test_a_step_of_ppo_reads_nothing_back(anywhere, env):
    config = PPOConfig(env=env, cell="none", hidden_size=8, num_envs=4, rollout_steps=32, entropy_coeff=0.1)
    object.__setattr__(config, "clip_epsilon_schedule", "linear")
    object.__setattr__(config, "learning_rate_schedule", "adaptive")
    object.__setattr__(config, "cuda_graph", True)  # a config rejects this on a CPU
    algorithm = PPO(config)
    batch = algorithm.estimator(algorithm.collect())
    (minibatch,) = SequenceMinibatches(batch.select(*algorithm.loss.in_keys, strict=False), 1, 32).entries()
    with NeverWaits():
        losses = algorithm.loss.gradients(minibatch)
        algorithm._adapt(losses["kl_approx"])
        algorithm.optimizer.descend(algorithm.total(losses))
    algorithm.close()
    with pytest.raises(AssertionError), NeverWaits():
        torch.ones(()).item()


@pytest.mark.parametrize("kind", ["a2c", "impala"])
def test_other_losses_learn_the_same_in_captured_steps(anywhere, kind):
    options = {"env": "recurl/RepeatPrevious-v0", "hidden_size": 8, "num_envs": 4, "rollout_steps": 32}
    config = ALGORITHMS[kind].config(**options, cell="none", total_steps=384, entropy_coeff=0.1)
    captured = copy.copy(config)
    object.__setattr__(captured, "cuda_graph", True)  # a config rejects this on a CPU
    seen = []
    for options in (config, captured):
        algorithm = ALGORITHMS[kind].learner(options)
        seen.append([algorithm.learn(algorithm.collect()) for _ in range(3)])
        batch = algorithm.estimator(algorithm.collect())
        (minibatch,) = SequenceMinibatches(batch.select(*algorithm.loss.in_keys, strict=False), 1).entries()
        with NeverWaits():
            algorithm.optimizer.descend(algorithm.total(algorithm.loss.gradients(minibatch)))
        algorithm.close()
    for plain, graphed in zip(*seen, strict=True):
        assert graphed == pytest.approx(plain, rel=1e-3, abs=1e-5)


def test_needs_a_cuda_device():
    net, optimizer, step = make()
    with pytest.raises(UsageError, match=r"needs all parameters on a CUDA device, got some on cpu: move"):
        CudaGraphStep(step, net, optimizer)


def test_needs_a_capturable_optimizer(anywhere):
    net, _, step = make()
    with pytest.raises(ArgumentError, match="got a SGD without capturable=True"):
        CudaGraphStep(step, net, torch.optim.SGD(net.parameters()))
    with pytest.raises(ArgumentError, match="got a SGD without capturable=True"):
        CudaGraphStep(step, net, [make(net)[1], torch.optim.SGD(net.parameters())])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (batch(5), r"\('in', 'x'\) was \[4, 3\] float32 on cpu, now \[5, 3\] .*; 'y' was \[4, 1\]"),
        (batch().exclude("y"), r": 'y' is missing\. Use batches of equal size"),
        (batch(z=torch.zeros(4)), r": 'z' is new\."),
        (batch().double(), r"'y' was \[4, 1\] float32 on cpu, now \[4, 1\] float64"),
    ],
)
def test_batches_must_be_alike(anywhere, other, words):
    net, optimizer, step = make()
    graphed = CudaGraphStep(step, net, optimizer)
    graphed(batch())
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ArgumentError, match=words):
        graphed(other)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    graphed(batch())


def replace_parameter(net, optimizer):
    net.layer.bias = nn.Parameter(torch.zeros(1))


def move_data(net, optimizer):
    net.layer.bias.data = torch.zeros(1)


def replace_module(net, optimizer):
    net.layer = copy.deepcopy(net.layer)


def replace_buffer(net, optimizer):
    net.scale = nn.Buffer(torch.zeros(3))


def replace_state(net, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def replace_rate(net, optimizer):
    optimizer.param_groups[0]["lr"] = 0.5


def freeze(net, optimizer):
    net.layer.bias.requires_grad_(False)


def change_decay(net, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.5


def change_betas(net, optimizer):
    optimizer.param_groups[0]["betas"] = (0.9, 0.5)


@pytest.mark.parametrize(
    ("replace", "words"),
    [
        (freeze, "bias was replaced, frozen or unfrozen after the first step"),
        (change_decay, "weight_decay of optimizer 0, group 0, number 0, was replaced"),
        (change_betas, "betas of optimizer 0, group 0, number 1, was replaced"),
        (replace_parameter, "bias was replaced, frozen or unfrozen after the first step"),
        (move_data, "bias was replaced, frozen or unfrozen after the first step"),
        (replace_module, "layer was replaced, frozen or unfrozen after the first step"),
        (replace_buffer, "scale was replaced, frozen or unfrozen after the first step"),
        (replace_state, "state of optimizer 0 was replaced"),
        (replace_rate, "learning rate of optimizer 0, group 0, which must be a tensor, was replaced"),
    ],
)
def test_replaced_tensors_are_noticed(anywhere, replace, words):
    net, optimizer, step = make()
    graphed = CudaGraphStep(step, net, optimizer)
    graphed(batch())
    replace(net, optimizer)
    with pytest.raises(UsageError, match=words):
        graphed(batch())
    graphed.reset()
    graphed(batch(7))


def test_changes_in_place_are_allowed(anywhere, capfd):
    net, optimizer, step = make()
    graphed = CudaGraphStep(step, net, optimizer)
    graphed(batch())
    assert capfd.readouterr().err == ""
    with torch.no_grad():
        net.layer.weight.fill_(1.0)
        net.scale.fill_(2.0)
        optimizer.param_groups[0]["lr"].fill_(0.0)
    graphed(batch())
    assert (net.layer.weight == 1.0).all()


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (
            "operation not permitted when stream is capturing",
            UsageError,
            "step can't be captured.*don't wait for",
        ),
        ("the shapes don't fit", RuntimeError, "the shapes don't fit"),
    ],
)
def test_a_step_that_cannot_be_captured(anywhere, monkeypatch, said, kind, words):
    def fail(*_):
        raise RuntimeError(said)

    net, optimizer, step = make()
    graphed = CudaGraphStep(step, net, optimizer)
    with monkeypatch.context() as patched:
        patched.setattr("recurl.execution.capture.record", fail)
        graphed(batch())
        graphed(batch())
        before = copy.deepcopy(net.state_dict())
        for _ in range(2):
            with pytest.raises(kind, match=words):
                graphed(batch())
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    graphed(batch())
    assert len(anywhere) == 1


def test_every_call_makes_one_step(anywhere):
    net, optimizer, step = make()
    graphed = CudaGraphStep(step, net, optimizer)
    data, captures, losses = batch(), [], []
    for count in range(1, 6):
        losses.append(graphed(data)[0])
        captures.append(len(anywhere))
        assert optimizer.state[net.layer.weight]["step"] == count
    assert captures == [0, 0, 1, 1, 1]
    assert len({loss.item() for loss in losses}) == 5  # later calls don't change earlier results
    graphed.reset()
    for _ in range(3):
        graphed(batch(6))
    assert len(anywhere) == 2


def test_a_captured_step_reads_its_own_copy_of_the_batch(anywhere):
    net, optimizer, _ = make()
    given = []

    def step(data, factor):
        given.append((data["x"], factor))
        return data["x"].mul_(factor).sum()

    graphed = CudaGraphStep(step, net, optimizer)
    for number in range(1, 6):
        data, factor = TensorDict({"x": torch.full((2,), float(number))}, [2]), torch.tensor(2.0)
        assert graphed(data, factor) == 4 * number
        assert data["x"].tolist() == [number] * 2
        assert given[-1][0] is not data["x"]
        assert given[-1][1] is not factor
    memory = {(x.data_ptr(), factor.data_ptr()) for x, factor in given[2:]}
    assert len(memory) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.set("y", data["y"].requires_grad_()), "must not require gradients, but 'y' does: detach it"),
        (lambda data: data.set("y", data["y"].to("meta")), "must be on cpu, like the parameters, but 'y' is on meta"),
    ],
)
def test_batches_that_cannot_be_captured(anywhere, change, words):
    net, optimizer, step = make()
    with pytest.raises(ArgumentError, match=words):
        CudaGraphStep(step, net, optimizer)(change(batch()))


def test_results_may_be_nested(anywhere):
    class Found(NamedTuple):
        loss: torch.Tensor
        parts: list

    def step(data):
        return {"found": Found(data["y"].sum(), [data["y"].mean(), 3]), "batch": data.select("y")}

    net, optimizer, _ = make()
    graphed = CudaGraphStep(step, net, optimizer)
    kept = [graphed(batch()) for _ in range(2)] + [graphed(batch().mul(number)) for number in range(3, 6)]
    for number, results in zip((1, 1, 3, 4, 5), kept, strict=True):
        torch.testing.assert_close(results["found"].loss, number * batch()["y"].sum())
        assert results["found"].parts[1] == 3
        assert (results["batch"]["y"] == number * batch()["y"]).all()
