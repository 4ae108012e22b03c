from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector
from recurl.data import LazyTensorStorage, TensorDictReplayBuffer
from recurl.data.replay_buffers.samplers import SliceSampler
from recurl.envs import GymEnv
from recurl.envs.utils import exploration_type, set_exploration_type
from recurl.modules import GRUModule, set_recurrent_mode
from recurl.sequences.mode import ExplorationType, recurrent_mode


class Buffer:
    """Stores the batches it is extended with, and lets a thread wait for them."""

    def __init__(self, ndim: int | None = None) -> None:
        self.batches: list = []
        if ndim is not None:
            self.storage = SimpleNamespace(ndim=ndim)

    def extend(self, batch: object) -> None:
        self.batches.append(batch)

    def wait(self, count: int) -> None:
        end = time.monotonic() + 20
        while len(self.batches) < count:
            assert time.monotonic() < end
            time.sleep(0.002)


def make_policy() -> Seq:
    torch.manual_seed(0)
    head = Mod(nn.Linear(8, 2), ["features"], ["logits"])
    choose = Mod(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    return Seq(GRUModule(4, 8, in_key="observation", out_key="features"), head, choose)


def make(policy: object = None, buffer: object = None, **options: object) -> Collector:
    env = GymEnv("CartPole-v1", num_envs=2)
    return Collector(env, policy, frames_per_batch=16, replay_buffer=buffer, **options)


def add(policy: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(value)


def replays(batch: object, policy: object) -> bool:
    with set_recurrent_mode(True), torch.no_grad():
        return torch.allclose(policy(batch.clone())["features"], batch["features"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ndim", "shape"), [(None, (2, 8)), (1, (16,)), (2, (2, 8))])
def test_batches_go_to_the_buffer(ndim: int | None, shape: tuple[int, ...]) -> None:
    buffer = Buffer(ndim)
    collector = make(buffer=buffer, total_frames=48)
    assert list(collector) == [None] * 3
    assert [batch.shape for batch in buffer.batches] == [shape] * 3
    assert collector.collect().shape == (2, 8)
    assert len(buffer.batches) == 3


@pytest.mark.tensordict_0_15
@pytest.mark.parametrize("ndim", [1, 2])
def test_slices_of_a_buffer_that_is_filled_in_the_background(ndim: int) -> None:
    policy = make_policy()
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200, ndim=ndim),
        sampler=SliceSampler(slice_len=4, strict_length=False),
        batch_size=32,
    )
    collector = make(policy, buffer)
    collector.start()
    end = time.monotonic() + 20
    while collector.frames < 400 and time.monotonic() < end:  # the ring wraps around
        assert len(buffer) == 0 or replays(buffer.sample(), policy)
    collector.async_shutdown()
    assert len(buffer) > 150


def test_postproc_comes_before_the_buffer() -> None:
    buffer = Buffer(1)
    assert list(make(buffer=buffer, total_frames=16, postproc=lambda batch: batch.numel())) == [None]
    assert buffer.batches == [16]


@pytest.mark.tensordict_0_15
def test_background_collection_until_it_is_stopped() -> None:
    buffer, policy = Buffer(), make_policy()
    collector = make(policy, buffer)
    with set_recurrent_mode(True), set_exploration_type(ExplorationType.MODE):
        collector.start()
        buffer.wait(3)
        assert collector.running
        assert recurrent_mode() is True
        assert exploration_type() is ExplorationType.MODE
        collector.async_shutdown()
    assert not collector.running
    assert collector.env.is_closed
    count = len(buffer.batches)
    assert collector.frames == 16 * count
    assert all(replays(batch, policy) for batch in buffer.batches)
    ids = torch.cat([batch["collector", "traj_ids"] for batch in buffer.batches], 1)
    init = torch.cat([batch["is_init"] for batch in buffer.batches], 1).squeeze(-1)
    assert torch.equal(ids[:, 1:] != ids[:, :-1], init[:, 1:])


@pytest.mark.tensordict_0_15
def test_background_collection_ends_with_the_frames() -> None:
    buffer = Buffer()
    collector = make(buffer=buffer, total_frames=32)
    collector.start()
    buffer.wait(2)
    end = time.monotonic() + 10
    while collector.running and time.monotonic() < end:
        time.sleep(0.002)
    assert not collector.running
    assert len(buffer.batches) == 2
    collector.shutdown()


@pytest.mark.tensordict_0_15
def test_the_background_has_its_own_modes() -> None:
    seen = []

    def policy(td: object) -> object:
        seen.append((recurrent_mode(), exploration_type(), torch.is_grad_enabled(), threading.current_thread().name))
        return td.set("action", torch.zeros(2, dtype=torch.int64))

    buffer = Buffer()
    collector = make(policy, buffer, exploration_type=ExplorationType.RANDOM)
    with set_recurrent_mode(True):
        collector.start()
        for _ in range(200):  # these must not leak into the thread, and its own must not leak out
            with set_exploration_type(ExplorationType.MODE):
                time.sleep(0.0005)
                assert exploration_type() is ExplorationType.MODE
        buffer.wait(1)
        collector.async_shutdown()
    assert exploration_type() is None
    assert set(seen) == {(False, ExplorationType.RANDOM, False, "recurl-collector")}


@pytest.mark.tensordict_0_15
def test_the_background_policy_changes_only_on_request() -> None:
    buffer, policy = Buffer(), make_policy()
    old, new = make_policy(), make_policy()
    collector = make(policy, buffer)
    collector.start()
    assert collector.policy is not policy
    add(policy, 0.3)
    add(new, 0.3)
    start = len(buffer.batches)
    buffer.wait(start + 2)
    start = len(buffer.batches)
    collector.update_policy_weights_()
    add(policy, 0.3)  # after the handover: no effect
    buffer.wait(start + 4)
    collector.async_shutdown()
    assert all(replays(batch, old) for batch in buffer.batches[:start])
    assert replays(buffer.batches[-1], new)
    assert not replays(buffer.batches[-1], old)
    assert all(replays(batch, old) != replays(batch, new) for batch in buffer.batches)


@pytest.mark.tensordict_0_15
def test_an_exception_in_the_background_surfaces_once_at_the_next_call() -> None:
    def policy(td: object) -> object:
        raise ZeroDivisionError("in the policy")

    calls = (
        lambda c: c.update_policy_weights_(),
        lambda c: c.collect(),
        lambda c: next(iter(c)),
        lambda c: c.state_dict(),
        lambda c: c.set_seed(0),
        lambda c: c.start(),
        lambda c: c.async_shutdown(),
        lambda c: c.shutdown(),
    )
    for call in calls:
        collector = make(policy, Buffer())
        collector.start()
        end = time.monotonic() + 10
        while collector.running and time.monotonic() < end:
            time.sleep(0.002)
        with pytest.raises(ZeroDivisionError, match="in the policy"):
            call(collector)
        collector.shutdown()
        assert collector.env.is_closed


@pytest.mark.tensordict_0_15
def test_saving_and_seeding_between_batches_of_the_background() -> None:
    buffer = Buffer()
    env = GymEnv("recurl/RepeatPrevious-v0", num_envs=2)
    collector = Collector(env, frames_per_batch=16, replay_buffer=buffer)
    collector.start()
    buffer.wait(1)
    collector.set_seed(3)
    state = collector.state_dict()
    assert state["frames"] % 16 == 0
    with pytest.raises(ValueError, match="names"):
        collector._between_batches(lambda: int("names"))
    assert collector.running
    collector.shutdown()
    fresh = Collector(GymEnv("recurl/RepeatPrevious-v0", num_envs=2), frames_per_batch=16)
    assert fresh.load_state_dict(state) is True


def test_threads_with_one_exploration_type_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recurl.collectors.exploring._OF_THREAD", {})  # as with tensordict 0.14
    buffer = Buffer()
    collector = make(make_policy(), buffer)
    with pytest.raises(
        NotImplementedError,
        match=r"needs a separate exploration type, but tensordict [\d.]+ has one for all threads\. Install",
    ):
        collector.start()
    assert not collector.running
    assert collector.collect().shape == (2, 8)
    assert exploration_type() is None
    collector.shutdown()


@pytest.mark.tensordict_0_15
def test_misuse() -> None:
    with pytest.raises(TypeError, match="replay_buffer must have a method extend"):
        make(buffer=3)
    with pytest.raises(RuntimeError, match="pass replay_buffer="):
        make().start()
    release = threading.Event()

    def policy(td: object) -> object:
        release.wait(20)
        return td.set("action", torch.zeros(2, dtype=torch.int64))

    collector = make(policy, Buffer())
    collector.start()
    for call in (
        collector.start,
        collector.collect,
        lambda: next(iter(collector)),
        lambda: collector.load_state_dict({}),
    ):
        with pytest.raises(RuntimeError, match="runs in the background"):
            call()
    with pytest.raises(RuntimeError, match=r"has not finished its batch after 0.01 s"):
        collector.async_shutdown(timeout=0.01)
    release.set()
    collector.async_shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        collector.start()
