"""Off-policy learners with slices sampled on the device: same as on the host, compiled, captured, without waits."""

import copy
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recurl.core.errors import ArgumentError
from recurl.core.torch_compat import compiling
from recurl.trainers import ALGORITHMS
from recurl.trainers.checkpoint import load_checkpoint, save_checkpoint

CHOICE = {"env": "recurl/RepeatPrevious-v0", "env_kwargs": ("k=1", "episode_length=10"), "cell": "gru"}
BOX = {"env": "recurl/MaskedPendulum-v1", "env_kwargs": ("max_episode_steps=10",), "cell": "gru"}
SMALL = {
    "hidden_size": 8,
    "num_envs": 4,
    "rollout_steps": 16,
    "slices": 6,
    "slice_length": 8,
    "learning_starts": 100,
    "gradient_steps": 4,
    "total_steps": 640,
    "buffer_size": 160,
}


def config(kind, **options):
    return ALGORITHMS[kind].config(**{**(BOX if kind == "td3" else CHOICE), **SMALL, "drawn_on": "device", **options})


def updates(options, count=5, **changes):
    """The learner after some updates, and their metrics."""
    options = copy.copy(options)
    for name, value in changes.items():
        object.__setattr__(options, name, value)  # a config rejects a CUDA graph on a CPU
    learner = ALGORITHMS[options.algorithm].learner(options)
    rows = [learner.learn(learner.collect()) for _ in range(count)]
    learner.close()
    return learner, rows


def check_same(rows, others, **tolerance):
    for row, other in zip(rows, others, strict=True):
        assert other == pytest.approx(row, nan_ok=True, **tolerance)


EXACT = [  # losses that draw no random numbers
    ("r2d2", {}),
    ("r2d2", {"drawn_by": "trajectory", "burn_in": 3, "num_layers": 2}),
    ("dqn", {"burn_in": 0, "target_interval": 3, "scale_rewards": True, "cell": "lstm"}),
    ("dqn", {"start_state": "zero", "burn_in": 5, "greedy_returns": False}),
    ("dqn", {"cell": "none"}),
    ("sac", {"burn_in": 2, "prioritized": True}),
    ("sac", {"shared_trunk": False, "target_entropy": 0.5, "slice_length": 12}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), EXACT)
def test_learns_the_same_as_from_host_slices(kind, options):
    """Samples are the same, bit for bit, and masked steps have no effect."""
    device, rows = updates(config(kind, **options))
    host, others = updates(config(kind, **options, drawn_on="host"))
    check_same(rows, others, rel=2e-3, abs=1e-5)
    for got, expected in zip(device.agent.parameters(), host.agent.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=5e-3, atol=1e-4)


ALL = [
    ("r2d2", {}),
    ("dqn", {"target_interval": 3}),
    ("dqn", {"drawn_by": "trajectory", "cell": "none"}),
    ("sac", {**BOX, "burn_in": 2}),
    ("sac", {"prioritized": True, "target_entropy": 0.5}),
    ("td3", {"prioritized": True, "burn_in": 2}),
    ("td3", {"gradient_steps": 3, "shared_trunk": False}),
]


@pytest.mark.parametrize(("kind", "options"), ALL)
def test_a_captured_update_is_the_update(anywhere, kind, options):
    _, plain = updates(config(kind, **options))
    learner, rows = updates(config(kind, **options), cuda_graph=True)
    check_same(plain, rows, rel=1e-3, abs=1e-5)  # capturable optimizers round differently
    assert all(torch.tensor(list(rows[-1].values())).isfinite())
    assert learner._graphs == {}  # closed


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [ALL[0], ALL[3], ALL[6]])
def test_a_compiled_update_is_the_update(kind, options):
    _, plain = updates(config(kind, **options))
    _, rows = updates(config(kind, **options, compile=True))
    check_same(plain, rows, rel=2e-3, abs=1e-4)


class NeverWaits(TorchDispatchMode):
    """Rejects operations that can't be captured: value reads, data-dependent shapes, tensors from Python numbers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique_dim")
        if name in ("index", "index_put", "index_put_"):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "options"), [*ALL, ("sac", {"action_mask": "none", "fixed_alpha": True})])
def test_an_update_reads_nothing_back(anywhere, kind, options):
    options = config(kind, **options)
    object.__setattr__(options, "cuda_graph", True)
    learner = ALGORITHMS[kind].learner(options)
    for _ in range(3):
        learner.learn(learner.collect())
    batch = learner.collect()
    stored = batch.select(*learner.loss.in_keys, strict=False)
    kinds = tuple(learner.count() for _ in range(options.gradient_steps))
    with NeverWaits():
        learner._store_and_learn(stored, kinds)
    learner.close()


class Repeated(TorchDispatchMode):
    """Repeats launched operations on the same memory without Python, as a CUDA graph does."""

    def __init__(self):
        super().__init__()
        self.launched = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.launched.append((function, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def replay(self):
        for function, args, named, found in self.launched:
            again = function(*args, **named)
            for kept, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("r2d2", {"learning_rate_schedule": "linear"}),
        ("dqn", {"drawn_by": "trajectory", "target_interval": 4, "scale_rewards": True}),
        ("sac", {**BOX, "burn_in": 2}),
        ("td3", {"prioritized": True}),
    ],
)
def test_every_update_launches_the_same_kernels(anywhere, kind, options):
    """No Python number changes between updates: the buffer fills and wraps around, entirely on the device."""
    rows, weights = [], []
    for repeats in (False, True):
        chosen = config(kind, **options, total_steps=1280)
        object.__setattr__(chosen, "cuda_graph", True)
        learner = ALGORITHMS[kind].learner(chosen)
        for _ in range(3):  # the next fills the buffer, those after it overwrite
            learner.learn(learner.collect())
        learner._update = repeating(learner) if repeats else launching(learner)
        rows.append([learner.learn(learner.collect()) for _ in range(6)])
        weights.append([value.clone() for value in learner.loss.state_dict().values()])
        learner.close()
    assert rows[0] == rows[1]
    assert all(map(torch.equal, *weights))
    assert rows[0][0] != rows[0][-1]


def launching(learner):
    """An update whose kernels are operators, which a dispatch mode sees: others round differently."""

    def update(stored, kinds):
        with compiling():
            return learner._store_and_learn(stored, kinds)

    return update


def repeating(learner):
    """An update that is recorded at the first call and then replayed."""
    memory, graph, result = [], Repeated(), []

    def update(stored, kinds):
        if memory:
            memory[0].copy_(stored)
            assert memory[1] == kinds
            graph.replay()
        else:
            memory.extend([stored.clone(), kinds])
            with graph:
                result.append(launching(learner)(memory[0], kinds))
        return result[0].clone()

    return update


@pytest.mark.parametrize(("kind", "options"), [ALL[0], ALL[3], ALL[5]])
def test_a_run_resumes_from_a_checkpoint(anywhere, tmp_path, kind, options):
    options = config(kind, **options)
    object.__setattr__(options, "cuda_graph", True)
    whole, resumed = (ALGORITHMS[kind].learner(options) for _ in range(2))
    for _ in range(3):
        whole.learn(whole.collect())
    path = save_checkpoint(tmp_path, 192, {"algorithm": whole.state_dict(), "rng": torch.get_rng_state()})
    expected = [whole.learn(whole.collect()) for _ in range(3)]
    whole.close()
    state = load_checkpoint(path)
    resumed.load_state_dict(state["algorithm"])
    torch.set_rng_state(state["rng"])
    assert [resumed.learn(resumed.collect()) for _ in range(3)] == expected
    resumed.close()


@pytest.mark.parametrize(("kind", "options"), [ALL[0], ALL[4], ALL[5]])
def test_non_finite_numbers_change_nothing_and_are_reported_when_read(kind, options):
    learner = ALGORITHMS[kind].learner(config(kind, **options, scale_rewards=False))
    for _ in range(2):
        learner.learn(learner.collect())
    batch = learner.collect()
    batch["next", "reward"].fill_(torch.nan)
    for _ in range(3):
        learner.learn(batch)  # all stored entries at the end
    spoilt = learner.optimizer if kind == "r2d2" else learner.critic_optimizer  # the actor's loss has no rewards
    trained = spoilt._tensors()
    before, priority = [value.clone() for value in trained], learner.buffer.drawing.priority.clone()
    learner.fault = None
    read = learner.learn_later(batch)
    assert learner.learns_ahead
    assert learner.fault is None
    read()
    assert "was nan" in learner.fault
    assert all(map(torch.equal, trained, before))
    assert priority.isfinite().all()
    assert torch.equal(learner.buffer.drawing.priority.unique(), priority.unique())
    learner.close()


@pytest.mark.parametrize(("before", "now"), [("host", "device"), ("device", "host")])
def test_a_run_resumes_with_or_without_padding(before, now):
    options = {"prioritized": True, "n_steps": 2}
    learner, _ = updates(config("dqn", drawn_on=before, **options), 3)
    other = ALGORITHMS["dqn"].learner(config("dqn", drawn_on=now, **options))
    other.load_state_dict(learner.state_dict())
    assert (other.buffer[:] == learner.buffer[:]).all()
    assert torch.equal(other.buffer.drawing.priority, learner.buffer.drawing.priority)
    for each in (learner, other):
        torch.manual_seed(0)
        each.drawn = each.buffer.sample()
    host, device = (learner.drawn, other.drawn) if before == "host" else (other.drawn, learner.drawn)
    mask = device.get(("collector", "mask"))
    assert torch.equal(host["index"], device["index"][mask])
    assert all(math.isfinite(number) for number in other.learn(other.collect()).values())
    other.close()


def test_an_overridden_learn_is_synchronous():
    learner = ALGORITHMS["dqn"].learner(config("dqn"))
    learner.learn = lambda batch: {"loss": 1.0}
    assert not learner.learns_ahead
    assert learner.learn_later(learner.collect())() == {"loss": 1.0}
    learner.close()


@pytest.mark.parametrize("kind", ["dqn", "r2d2", "sac", "td3"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuda_graph": True}, "--cuda-graph needs --device cuda, got cpu"),
        ({"cuda_graph": True, "device": "cuda", "backend": "pad"}, "--cuda-graph needs --backend fastest or triton"),
        ({"compile": True, "backend": "loop"}, "--compile needs a built-in cell and .* got gru and loop"),
        ({"compile": True, "drawn_on": "host"}, "--compile needs slices of equal length, .* got --drawn-on host"),
        ({"refresh_states": True}, "--refresh-states needs --drawn-on host, without --cuda-graph and --compile"),
        (
            {"refresh_states": True, "drawn_on": "auto", "compile": True},
            "--drawn-on device, which doesn't support --refresh-states",
        ),
    ],
)
def test_options_that_cannot_be_used(kind, options, message):
    with pytest.raises(ArgumentError, match=message):
        config(kind, **options)


def test_slices_are_drawn_on_the_device_for_programs():
    assert not config("sac", drawn_on="auto").draws_on_device
    assert config("sac", drawn_on="auto", compile=True).draws_on_device
    captured = config("sac", drawn_on="auto", cuda_graph=True, device="cuda")
    assert captured.draws_on_device
    assert not captured.on_cpu().draws_on_device
