from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import threading
import time

import cloudpickle
import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

import logged_steps as logged
from recurl.collectors import RayCollector
from recurl.collectors.actors import group, session
from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError, UsageError, WorkerError
from recurl.core.specs import Categorical
from recurl.envs import EnvBase, GymEnv
from recurl.modules import EGreedyModule, GRUModule
from tests.collectors.test_background import add, replays

pytestmark = pytest.mark.slow

# Actors can't import the tests: objects defined here are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(logged)


def make_policy() -> Seq:
    torch.manual_seed(0)
    gru = GRUModule(4, 8, in_key="observation", out_key="features")
    for parameter in gru.parameters():
        nn.init.normal_(parameter)
    head = Mod(nn.Linear(8, 4), ["features"], ["logits"])
    return Seq(gru, head, Mod(lambda x: (x + torch.randn_like(x)).argmax(-1), ["logits"], ["action"]))


def env_of(rows: int | None) -> EnvBase:
    return GymEnv("recurl/RepeatPrevious-v0", num_envs=rows)


@pytest.fixture(scope="module")
def policy() -> Seq:
    return make_policy()


@pytest.fixture(scope="module")
def sync(ray_cluster, policy: Seq):
    options = {"frames_per_batch": 120, "total_frames": 240, "max_frames_per_traj": 7, "cat_results": 0}
    with RayCollector(lambda: env_of(3), policy, num_collectors=2, **options) as collector:
        yield collector


@pytest.fixture
def collector(sync: RayCollector, policy: Seq) -> RayCollector:
    """The shared collector with its initial weights and frames."""
    policy.load_state_dict(make_policy().state_dict())
    sync.update_policy_weights_()
    sync.frames = 0
    return sync


def test_batches_of_all_actors(collector: RayCollector, policy: Seq) -> None:
    batches = list(collector)
    assert len(batches) == 2
    for batch in batches:
        assert batch.shape == (6, 20)
        assert batch.names == [None, "time"]
        assert batch["next", "done"].any()
        assert replays(batch, policy)
        assert not batch["collector", "lag"].any()
    both = torch.cat(batches, -1)
    init = both["is_init"].squeeze(-1)
    assert torch.equal(init[..., 1:], both["next", "done"].squeeze(-1)[..., :-1])
    ids, steps = both["collector", "traj_ids"], both["collector", "traj_steps"]
    assert torch.equal(ids[..., 1:] != ids[..., :-1], init[..., 1:])
    assert torch.equal(steps[:, 1:][~init[:, 1:]], steps[:, :-1][~init[:, 1:]] + 1)
    rows = [set(row.tolist()) for row in ids]
    assert sum(map(len, rows)) == len(set.union(*rows))
    assert not torch.equal(batch["action"][:3], batch["action"][3:])  # every actor draws different numbers
    assert collector.replacements == []


def test_every_batch_names_the_weights_of_its_policy(
    collector: RayCollector, policy: Seq, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, version = make_policy(), collector.version
    assert replays(collector.collect(), old)
    add(policy, 0.2)
    assert replays(collector.collect(), old)
    for _ in range(3):
        collector.update_policy_weights_()  # one version, as no actor has received the others
    batch = collector.collect()
    assert replays(batch, policy)
    assert batch["collector", "version"].unique().tolist() == [version + 1]
    with pytest.raises(ArgumentError, match=r"the policy's names and shapes, but they differ in \['other'\]"):
        collector.update_policy_weights_({**old.state_dict(), "other": torch.zeros(1)})

    monkeypatch.setattr(collector, "max_lag", 1)
    collector.total_frames = -1
    lags = []
    for _ in range(3):
        batch = collector.collect()
        lags.append(batch["collector", "lag"].unique().tolist())
        collector.update_policy_weights_()
    assert lags == [[0], [1], [1]]
    assert batch["collector", "version"].unique().tolist() == [collector.version - 2]
    monkeypatch.setattr(collector, "max_lag", 0)
    collector.collect()  # the batch that was ahead
    collector.total_frames = 240


def test_state_dict_continues_exactly(collector: RayCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "max_lag", 1)
    monkeypatch.setattr(collector, "total_frames", -1)
    collector.collect()
    state = collector.state_dict()
    expected = [collector.collect() for _ in range(3)]
    assert collector.load_state_dict(state) is True
    assert collector.frames == 120
    for before in expected:
        batch = collector.collect()
        assert (batch.exclude("collector") == before.exclude("collector")).all()
        steps = batch["collector", "traj_steps"]
        assert torch.equal(steps, before["collector", "traj_steps"])
    assert not set(batch["collector", "traj_ids"][:, -1].tolist()) & set(
        before["collector", "traj_ids"][:, -1].tolist()
    )
    with pytest.raises(ArgumentError, match="must be of a collector with 2 actors, got that of 1"):
        collector.load_state_dict({**state, "workers": state["workers"][:1]})
    monkeypatch.setattr(collector, "max_lag", 0)
    collector.collect()


def test_seeds_and_restarted_rows(collector: RayCollector) -> None:
    collector.collect()
    rows = torch.tensor([False, True, False, False, False, True])
    collector.reset_rows(rows)
    begins = collector.collect()["collector", "traj_steps"][:, 0] == 0
    assert begins[rows].all()
    state, actions = collector.state_dict(), []
    for seed in (4, 3, 3):
        collector.load_state_dict(state)
        collector.set_seed(seed)
        actions.append(collector.collect()["action"])
    assert [collector._recipe.env_seed(index) for index in range(2)] == [3, 6]
    assert len({collector._recipe.env_seed(index, 1) for index in range(2)} - set(range(100))) == 2
    assert torch.equal(actions[1], actions[2])
    assert not torch.equal(actions[0], actions[1])
    assert not torch.equal(actions[1][:3], actions[1][3:])


@pytest.mark.full
def test_actors_that_die_alone_or_with_their_node(ray_cluster, sync: RayCollector, tmp_path) -> None:
    file = tmp_path / "steps"
    size = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    node = ray_cluster.add_node(**size)  # four CPUs are free now, two of them there
    create = functools.partial(logged.logged, file, seconds=0.001)
    batches = []
    with RayCollector(create, num_collectors=4, frames_per_batch=80, total_frames=1600, max_lag=1) as collector:

        def collect(count: int) -> None:
            batches.extend(itertools.islice(collector, count))

        collect(3)
        os.kill(collector.processes[2], signal.SIGKILL)
        with pytest.warns(UserWarning, match=r"Collector actor 2 died and is replaced; at most 20 frames are lost: "):
            collect(5)
        ray_cluster.remove_node(node, allow_graceful=False)
        node = ray_cluster.add_node(**size)
        with pytest.warns(UserWarning, match=r"Collector actor \d died and is replaced; at most 20 frames are lost: "):
            collect(20)
        assert len(collector.replacements) == 3
        assert any(replaced.unfinished for replaced in collector.replacements)
        assert len(batches) == 20
        assert all(batch.shape == (4, 2, 10) for batch in batches)
        logged.check_exactly_once(batches, file, collector.lost_frames)
        for replaced in collector.replacements:
            check_unfinished(batches, replaced)
    ray_cluster.remove_node(node)


def check_unfinished(batches: list, replaced) -> None:
    """Check that unfinished trajectories end without being done, and their rows continue with new ones."""
    both = torch.cat([batch[replaced.actor] for batch in batches], -1)
    ids, steps, done = both["collector", "traj_ids"], both["collector", "traj_steps"], both["next", "done"][..., 0]
    for name in replaced.unfinished:
        row, last = (ids == name).nonzero()[-1].tolist()
        assert not done[row, last]
        assert steps[row, last + 1] == 0


@pytest.mark.full
def test_one_actor_after_the_other(ray_cluster, tmp_path) -> None:
    file = tmp_path / "steps"
    slow = functools.partial(logged.logged, file, seconds=0.02)
    functions = [slow, functools.partial(logged.logged, file)]
    options = {"frames_per_batch": 10, "total_frames": 200, "sync": False}
    policy = Seq(
        Mod(nn.Linear(2, 2), ["observation"], ["logits"]),
        Mod(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
        EGreedyModule(Categorical(2), eps_init=1.0, eps_end=0.0),
    )
    with RayCollector(functions, policy, max_lag=3, epsilons=[0.0, 0.0], **options) as collector:
        batches = []
        for batch in collector:
            batches.append(batch)
            collector.update_policy_weights_()
        assert sum(batch.numel() for batch in batches) == 200
        assert max(int(batch["collector", "lag"].max()) for batch in batches) in (2, 3)
        numbers = [int(batch["next", "observation"][0, 0, 0]) for batch in batches]
        fewer, more = sorted(numbers.count(number) for number in set(numbers))
        assert more > fewer  # the fast one overtakes
        greedy = torch.stack([batch["action"] == batch["logits"].argmax(-1) for batch in batches])
        assert greedy.all()
        logged.check_exactly_once(batches, file, 0)
        with pytest.raises(UnsupportedError, match="Rows can be reset only if each batch has the rows of all actors"):
            collector.reset_rows(torch.ones(2, dtype=torch.bool))


@pytest.mark.full
def test_an_actor_that_dies_and_dies_again(ray_cluster, tmp_path) -> None:
    file, order, batches = tmp_path / "steps", tmp_path / "die", []
    create = functools.partial(logged.logged, file, seconds=0.001, dies_if=order)
    options = {"num_collectors": 1, "frames_per_batch": 20, "max_restarts": 1, "max_lag": 1}
    with RayCollector(create, **options) as collector:

        def collect_until(replacements: int) -> None:
            for batch in collector:
                batches.append(batch)
                if len(collector.replacements) == replacements:
                    return

        collect_until(0)
        os.kill(collector.processes[0], signal.SIGKILL)
        with pytest.warns(UserWarning, match=r"Collector actor 0 died and is replaced; at most 20 frames are lost: "):
            collect_until(1)
        batches.extend(itertools.islice(collector, 3))
        logged.check_exactly_once([batch[0] for batch in batches], file, collector.lost_frames)
        (replaced,) = collector.replacements
        assert replaced.unfinished
        check_unfinished(batches, replaced)
        order.touch()
        with (
            pytest.warns(UserWarning, match="Collector actor 0 died"),
            pytest.raises(WorkerError, match=r"died 2 times .* more than max_restarts=1 allows: .*process has died"),
        ):
            list(collector)


@pytest.mark.full
def test_an_actor_that_raises(ray_cluster) -> None:
    def broken(observation: torch.Tensor) -> torch.Tensor:
        raise ValueError("no idea")

    with RayCollector(
        lambda: env_of(2), Mod(broken, ["observation"], ["action"]), timeout=60, num_collectors=1, frames_per_batch=20
    ) as collector:
        process = collector.processes[0]
        with pytest.raises(
            WorkerError, match=r"Collector actor 0 \(process \d+\) raised ValueError: no idea"
        ) as raised:
            collector.collect()
        assert "in broken" in str(raised.value.__cause__)
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{process}"):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.full
def test_another_version_of_recurl(ray_cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "versions", lambda: {"recurl": "9.9", "torch": torch.__version__})
    with pytest.raises(UsageError, match=r"the same versions as the driver, but .* has recurl .* instead of 9.9"):
        RayCollector(lambda: env_of(2), num_collectors=1, frames_per_batch=20)


class Holder:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def make(self) -> EnvBase:
        return env_of(2)


def test_invalid_arguments(ray_cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    make = functools.partial(RayCollector, lambda: env_of(2), frames_per_batch=20)
    holder = Holder()
    with pytest.raises(ArgumentTypeError, match=r"must be picklable, but create_env_fn.lock is a lock: "):
        RayCollector(holder.make, num_collectors=1, frames_per_batch=20)
    with pytest.raises(ArgumentTypeError, match=r"create_env_fn.holder.lock is a lock"):
        RayCollector([lambda: holder.make()], frames_per_batch=20)
    policy = Mod(torch.nn.Linear(2, 2), ["observation"], ["action"])
    policy.lock = holder.lock
    with pytest.raises(ArgumentTypeError, match=r"must be picklable, but policy.lock is a lock: "):
        RayCollector(lambda: env_of(2), policy, num_collectors=1, frames_per_batch=20)
    with pytest.raises(ArgumentError, match="num_collectors must be at least 1, got 0"):
        RayCollector([], frames_per_batch=20)
    with pytest.raises(ArgumentError, match="Pass num_collectors, the number of actors"):
        make()
    with pytest.raises(ArgumentError, match="max_lag must not be negative, got -1"):
        make(num_collectors=1, max_lag=-1)
    with pytest.raises(ArgumentError, match=r"max_lag must be at least the number of actors, 2, .* got 1"):
        make(num_collectors=2, max_lag=1, sync=False)
    with pytest.raises(ArgumentError, match="one epsilon for each of the 2 actors, got 1"):
        make(num_collectors=2, epsilons=[0.1])
    with pytest.raises(ArgumentError, match="max_restarts must not be negative, got -1"):
        make(num_collectors=1, max_restarts=-1)
    with pytest.raises(ArgumentError, match="timeout must be positive, or None for no limit, got 0"):
        make(num_collectors=1, timeout=0)
    with pytest.raises(ArgumentError, match="num_cpus must not be negative, got -1"):
        make(num_collectors=1, num_cpus=-1)
    monkeypatch.setattr(session, "_FREE_SECONDS", 0.1)
    with pytest.raises(ArgumentError, match=r"4 actors need 36 CPUs of the Ray cluster, but \d of its \d+ are free"):
        make(num_collectors=4, num_cpus=9)
