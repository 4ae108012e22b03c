from __future__ import annotations

import sys
import time

import cloudpickle
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from recurl.collectors.asynchronous import common_info, dimension
from recurl.collectors.weights import SharedWeights
from recurl.collectors.worker import CollectorInfo
from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UnsupportedError, UsageError
from recurl.envs import EnvBase, GymEnv
from recurl.modules import GRUModule, set_recurrent_mode
from tests.collectors.test_background import Buffer, add, replays

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_interpreter")]

# Workers can't import the tests: objects defined here are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

BLOCK = 2**40


def make_policy() -> Seq:
    torch.manual_seed(0)
    gru = GRUModule(4, 8, in_key="observation", out_key="features")
    for parameter in gru.parameters():
        nn.init.normal_(parameter)
    noise = Mod(lambda x: (x + torch.randn_like(x)).argmax(-1), ["logits"], ["action"])
    return Seq(gru, Mod(nn.Linear(8, 4), ["features"], ["logits"]), noise)


def env_of(rows: int | None) -> EnvBase:
    return GymEnv("recurl/RepeatPrevious-v0", num_envs=rows)


@pytest.fixture(scope="module")
def policy() -> Seq:
    return make_policy()


@pytest.fixture(scope="module")
def sync(policy: Seq):
    options = {"frames_per_batch": 120, "total_frames": 240, "max_frames_per_traj": 7}
    with MultiSyncCollector([lambda: env_of(3)] * 2, policy, **options) as collector:
        yield collector


@pytest.fixture
def collector(sync: MultiSyncCollector, policy: Seq) -> MultiSyncCollector:
    """The shared collector with its initial weights and frames."""
    policy.load_state_dict(make_policy().state_dict())
    sync.update_policy_weights_()
    sync.frames = 0
    return sync


def test_batches_of_all_workers(collector: MultiSyncCollector, policy: Seq) -> None:
    batches = list(collector)
    assert len(batches) == 2
    for batch in batches:
        assert batch.shape == (2, 3, 20)
        assert batch.names == [None, None, "time"]
        assert batch["next", "done"].any()
        for data in (batch, batch.reshape(-1)):
            assert replays(data, policy)
    both = torch.cat(batches, -1)
    init = both["is_init"].squeeze(-1)
    assert torch.equal(init[..., 1:], both["next", "done"].squeeze(-1)[..., :-1])
    ids = both["collector", "traj_ids"]
    assert torch.equal(ids[..., 1:] != ids[..., :-1], init[..., 1:])
    rows = [set(row.tolist()) for row in ids.reshape(6, -1)]
    assert sum(map(len, rows)) == len(set.union(*rows))
    assert not torch.equal(batch["action"][0], batch["action"][1])  # every worker draws different numbers


def test_the_mode_outside_does_not_matter(collector: MultiSyncCollector, policy: Seq) -> None:
    with set_recurrent_mode(True):
        batch = collector.collect()
    assert replays(batch, policy)


def test_weights_arrive_when_they_are_handed_over(collector: MultiSyncCollector, policy: Seq) -> None:
    old = make_policy()
    add(policy, 0.2)
    batch = collector.collect()
    assert replays(batch, old)
    collector.update_policy_weights_()
    assert replays(collector.collect(), policy)
    for weights in (old, old.state_dict(), TensorDict.from_module(old)):
        collector.update_policy_weights_()
        collector.update_policy_weights_(weights)
        assert replays(collector.collect(), old)
    with pytest.raises(ArgumentError, match=r"the policy's names and shapes, but they differ in \['other'\]"):
        collector.update_policy_weights_({**old.state_dict(), "other": torch.zeros(1)})


def test_state_dict_continues_exactly(collector: MultiSyncCollector) -> None:
    collector.collect()
    state = collector.state_dict()
    expected = collector.collect()
    assert collector.load_state_dict(state) is True
    assert collector.frames == 120
    batch = collector.collect()
    assert (batch.exclude("collector") == expected.exclude("collector")).all()
    ids, before = batch["collector", "traj_ids"], expected["collector", "traj_ids"]
    assert torch.equal(ids[..., 0], before[..., 0])
    new = set(ids.unique().tolist()) - set(ids[..., 0].unique().tolist())
    assert new
    assert not new & set(before.unique().tolist())
    with pytest.raises(ArgumentError, match="must be of a collector with 2 workers, got that of 1"):
        collector.load_state_dict({**state, "workers": state["workers"][:1]})


@pytest.mark.parametrize(("dim", "shape"), [(0, (6, 20)), (1, (3, 40))])
def test_cat_results(
    collector: MultiSyncCollector,
    policy: Seq,
    dim: int,
    shape: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "_cat", dim)
    batch = collector.collect()
    assert batch.shape == shape
    assert batch.names[-1] == "time"
    assert replays(batch, policy)


def test_rows_of_workers_have_successive_seeds(policy: Seq) -> None:
    with MultiSyncCollector([lambda: env_of(3)] * 2, policy, frames_per_batch=24) as collector:
        collector.set_seed(5)
        for worker, first in enumerate(collector.collect()["observation"][..., 0, :]):
            assert torch.equal(first, env_of(3).reset(seed=5 + 3 * worker)["observation"])


def test_async_collection_and_the_buffer() -> None:
    buffer, policy = Buffer(1), make_policy()
    collector = MultiAsyncCollector(
        [lambda: env_of(None)] * 2,
        policy,
        frames_per_batch=30,
        total_frames=30_000,
        replay_buffer=buffer,
        reset_at_each_iter=True,
    )
    with pytest.raises(ArgumentError, match="A seed must be a non-negative integer, got -1"):
        collector.set_seed(-1)
    collector.set_seed(3)
    batches = [collector.collect()]
    while len({int(batch["collector", "traj_ids"][0]) // BLOCK for batch in batches}) < 2:  # one may start late
        batches.append(collector.collect())
    for batch in batches:
        assert batch.shape == (30,)
        assert batch.names == ["time"]
        assert batch["is_init"][0]
        assert replays(batch, policy)
    ids = [batch["collector", "traj_ids"] for batch in batches]
    workers = [set((i // BLOCK).tolist()) for i in ids]
    assert all(len(found) == 1 for found in workers)
    assert sum(len(i.unique()) for i in ids) == len(torch.cat(ids).unique())
    first = {found.pop(): batch for found, batch in zip(reversed(workers), reversed(batches), strict=True)}
    for seed, (_, batch) in enumerate(sorted(first.items())):
        env = env_of(None)
        assert torch.equal(env.reset(seed=3 + seed)["observation"], batch["observation"][0])

    collector.frames = 30_000 - 120
    assert list(collector) == [None] * 4
    assert [batch.shape for batch in buffer.batches] == [(30,)] * 4
    collector.frames = 0
    collector.start()
    add(policy, 0.2)
    collector.update_policy_weights_()
    end = time.monotonic() + 20
    while not (is_new := replays(buffer.batches[-1], policy)) and time.monotonic() < end:
        time.sleep(0.01)
    assert is_new  # the next one may be the other worker's, begun with the old weights
    assert not replays(buffer.batches[0], policy)
    collector.async_shutdown()
    for call in (collector.collect, collector.update_policy_weights_, collector.start):
        with pytest.raises(UsageError, match="was shut down"):
            call()


def test_errors_of_the_workers_collector() -> None:
    """The environment lacks entries that the policy needs, and the collector is not allowed to add them."""
    options = {"frames_per_batch": 3, "auto_register_policy_transforms": False}
    with pytest.raises(MissingKeyError, match=r"^Worker 0 .* raised MissingKeyError: The policy reads 'is_init'"):
        MultiSyncCollector([lambda: env_of(3)], make_policy(), **options)


def test_random_actions_and_rounding() -> None:
    with pytest.warns(UserWarning, match="frames_per_batch=8 is not a multiple of 1 x 3 rows: 9 will"):
        collector = MultiSyncCollector([lambda: env_of(3)], frames_per_batch=8)
    with collector:
        assert collector.collect().shape == (1, 3, 3)
        with pytest.raises(UsageError, match=r"Only an nn\.Module has weights"):
            collector.update_policy_weights_()
    with (
        pytest.warns(UserWarning, match="frames_per_batch=3 is not a multiple of 2 workers: 4 will"),
        pytest.raises(ArgumentError, match="timeout"),
    ):
        MultiSyncCollector([lambda: env_of(3)] * 2, frames_per_batch=3, timeout=0)


def test_arguments() -> None:
    create = [lambda: env_of(3)]
    for arguments, error, text in (
        ({"cat_results": "x"}, ArgumentError, "cat_results must be 'stack', None or a dimension, got 'x'"),
        ({"split": 3}, ArgumentTypeError, r"Unknown arguments \['split'\]"),
        ({"init_random_frames": -1}, ArgumentError, "init_random_frames must not be negative, got -1"),
        ({"timeout": -1.0}, ArgumentError, "timeout must be positive"),
        ({"frames_per_batch": 0}, ArgumentError, "frames_per_batch must be at least 1, got 0"),
    ):
        with pytest.raises(error, match=text):
            MultiSyncCollector(create, **{"frames_per_batch": 3, **arguments})
    for dim in (2, -3):
        with pytest.raises(ArgumentError, match=rf"dimension of a worker's batch \[3, 'T'\], got {dim}"):
            dimension(dim, torch.Size([3]))
    with pytest.raises(ArgumentTypeError, match="must be a list with one function per worker"):
        MultiAsyncCollector(create[0], frames_per_batch=3)
    with pytest.raises(ArgumentError, match="num_workers must be at least 1"):
        MultiAsyncCollector([], frames_per_batch=3)


def test_workers_must_have_the_same_rows() -> None:
    infos = [CollectorInfo(torch.Size([rows]), 3) for rows in (2, 3)]
    with pytest.raises(ArgumentError, match=r"that of worker 1 is \[3\], that of worker 0 is \[2\]"):
        common_info(infos)


def test_extra_state_of_a_policy() -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> dict:
            return {}

    with pytest.raises(UnsupportedError, match=r"also has \['_extra_state'\]"):
        SharedWeights.of(Extra())


def test_ids_of_collectors_in_this_process_differ() -> None:
    ids = Collector(env_of(2), frames_per_batch=4).collect()["collector", "traj_ids"]
    assert (ids < BLOCK).all()
