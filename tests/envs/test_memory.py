"""Environments and transforms that return one buffer, overwritten at every step: returned results don't change."""

import sys

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

from recurl.collectors import Collector, MultiSyncCollector
from recurl.core.keys import DONE
from recurl.core.specs import Categorical, Composite, Unbounded
from recurl.envs import EnvBase, GymWrapper, ParallelEnv, SerialEnv, TransformedEnv
from recurl.envs.gym_vector import SingleRowsVectorEnv
from recurl.execution.lowering import takes_entries
from recurl.transforms import Transform, makes_memory
from tests.envs.small import RowsEnv

pytestmark = pytest.mark.slow

# Workers can't import the tests, so definitions of this module are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LENGTH = 3


class Buffered(EnvBase):
    """Counts steps, row i from 100 i, in a buffer of one of several kinds; ``how="new"`` returns new tensors."""

    def __init__(self, how, rows=2):
        super().__init__(
            observation_spec=Composite(place=Unbounded(1), nested=Composite(place=Unbounded(1))),
            action_spec=Categorical(2),
            batch_size=[rows],
        )
        self.how = how
        self.array = np.zeros((rows, 1), np.float32)
        self.buffer = torch.zeros(rows, 1) if how in ("torch", "data") else None
        self.start = torch.arange(rows).unsqueeze(-1) * 100.0
        self.time = torch.zeros(rows, 1)

    def _show(self):
        value = self.start + self.time
        if self.how == "new":
            buffer = value
        elif self.how == "numpy":
            self.array[:] = value.numpy()
            buffer = torch.from_numpy(self.array)
        elif self.how == "same numpy":
            self.array[:] = value.numpy()
            self.buffer = torch.from_numpy(self.array) if self.buffer is None else self.buffer
            buffer = self.buffer
        elif self.how == "data":
            self.buffer.data.copy_(value)
            buffer = self.buffer
        else:
            buffer = self.buffer.zero_().add_(value)
        return TensorDict({"place": buffer, "nested": {"place": buffer}}, self.batch_size)

    def _reset(self, tensordict):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self.time = torch.zeros_like(self.time) if mask is None else self.time.masked_fill(mask, 0)
        return self._show()

    def _step(self, tensordict):
        self.time = self.time + 1
        after = self._show()
        over = self.time >= LENGTH + torch.arange(len(self.time)).unsqueeze(-1)
        return after.set("reward", self.time).set("done", over)

    def _set_seed(self, seed):
        pass


class FastBuffered(Buffered):
    """Same environment on plain tensors."""

    @takes_entries
    def _reset(self, tensordict):
        return super()._reset(tensordict)

    @takes_entries
    def _step(self, tensordict):
        return super()._step(tensordict)


HOWS = ["numpy", "same numpy", "torch", "data"]


def same(left, right):
    left, right = left.exclude("collector", "action"), right.exclude("collector", "action")
    assert left.keys() == right.keys()
    assert (left == right).all()


def expected(steps=7):
    out = Buffered("new").rollout(steps, break_when_any_done=False)
    assert out["place"][0, :, 0].tolist() == [0, 1, 2, 0, 1, 2, 0][:steps]
    assert out["next", "place"][0, :, 0].tolist() == [1, 2, 3, 1, 2, 3, 1][:steps]
    return out


@pytest.mark.parametrize("how", HOWS)
def test_rollouts(how):
    same(Buffered(how).rollout(7, break_when_any_done=False), expected())


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", [Buffered, FastBuffered])
def test_collected_batches(how, kind):
    with Collector(kind(how), frames_per_batch=8) as collector:
        batches = torch.cat([collector.collect(), collector.collect()], 1)
    same(batches[:, :7], expected())


@pytest.mark.usefixtures("shared_interpreter")
def test_batched_environments():
    makers = [lambda: Buffered("numpy"), lambda: Buffered("torch")]
    for env in (
        *(SerialEnv(2, lambda how=how: Buffered(how, 1)) for how in ("numpy", "torch")),
        ParallelEnv(2, makers),
    ):
        with env:
            out = env.rollout(7, break_when_any_done=False)
        for place, following in zip(out["place"], out["next", "place"], strict=True):
            assert place[0, :, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
            assert following[0, :, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.usefixtures("shared_interpreter")
def test_workers():
    with MultiSyncCollector([lambda: Buffered("torch")], frames_per_batch=14, cat_results=0) as collector:
        same(collector.collect(), expected())


class Counter(Transform):
    """Counts in one buffer, returned under its own name and in place of an observation."""

    def __init__(self):
        self.count = torch.zeros(2, 1)

    def transform_observation_spec(self, observation_spec):
        spec = observation_spec.clone()
        spec.set("count", Unbounded(*spec.shape, 1))
        return spec

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set("count", self.count)

    def _step(self, tensordict, next_tensordict):
        self.count += 1
        return next_tensordict.set("count", self.count)


def test_transforms():
    with Collector(TransformedEnv(Buffered("new"), Counter()), frames_per_batch=12) as collector:
        batch = collector.collect()
    assert batch["count"][0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["next", "count"][0, :, 0].tolist() == [1, 2, 3, 4, 5, 6]
    out = TransformedEnv(Buffered("new"), Counter()).rollout(4, break_when_any_done=False)
    assert out["count"][0, :, 0].tolist() == [0, 1, 2, 3]


class GymBuffered(gym.Env):
    """Counts in a single array."""

    observation_space = gym.spaces.Dict({"place": gym.spaces.Box(0, 99, (1,), np.float32)})
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.array = {"place": np.zeros(1, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.array["place"][:] = 0
        return self.array, {}

    def step(self, action):
        self.array["place"] += 1
        return self.array, 1.0, bool(self.array["place"][0] >= LENGTH), False, {}


def vector(mode, rows=2):
    create = [GymBuffered] * rows
    return gym.vector.SyncVectorEnv(create, copy=False, autoreset_mode=mode)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymWrapper(GymBuffered()),
        lambda: GymWrapper(vector(AutoresetMode.DISABLED)),
        lambda: GymWrapper(SingleRowsVectorEnv([vector(AutoresetMode.NEXT_STEP, 1) for _ in range(2)])),
    ],
    ids=["single", "vector", "single rows"],
)
def test_gymnasium(make):
    for steps in (make().rollout(7, break_when_any_done=False), collected(make())):
        rows = steps.reshape(-1, 7)
        assert rows["place"][0, :, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
        assert rows["next", "place"][0, :, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]


def collected(env):
    with Collector(env, frames_per_batch=7 * env.batch_size.numel()) as collector:
        return collector.collect()


def test_a_native_vector_environment():
    class Native(RowsEnv):
        def __init__(self):
            super().__init__(2, AutoresetMode.SAME_STEP)
            self.buffer = np.zeros((2, 2), np.float32)

        def _observe(self):
            self.buffer[:] = super()._observe()
            return self.buffer

    class Fresh(RowsEnv):
        def __init__(self):
            super().__init__(2, AutoresetMode.SAME_STEP)

    seen, wanted = collected(GymWrapper(Native())), collected(GymWrapper(Fresh()))
    assert (seen["observation"] == wanted["observation"]).all()
    running = ~wanted["next", "done"].squeeze(-1)  # it overwrites its final observations before they are read
    assert (seen["next", "observation"] == wanted["next", "observation"])[running].all()


class Marked(Buffered):
    """Claims that its tensors are new."""

    @makes_memory
    def _reset(self, tensordict):
        self.given = super()._reset(tensordict)
        return self.given

    @makes_memory
    def _step(self, tensordict):
        self.given = super()._step(tensordict)
        return self.given


def test_marked_results_are_not_copied():
    env = Marked("new")
    root = env.reset()
    assert root["place"] is env.given["place"]
    after = env.rand_step(root)["next"]
    assert after["place"] is env.given["place"]
    assert (after[DONE] == env.given[DONE]).all()

    class Overridden(Marked):
        def _step(self, tensordict):
            return super()._step(tensordict)

    env = Overridden("torch")
    assert env.reset()["place"] is not env.given["place"]
    same(Overridden("torch").rollout(7, break_when_any_done=False), expected())
