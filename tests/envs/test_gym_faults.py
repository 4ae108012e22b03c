"""Gymnasium environments that return invalid results, and vector environments that reject an autoreset mode."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from recurl.core.errors import ArgumentError, ArgumentTypeError, UsageError
from recurl.envs import GymEnv, GymWrapper
from tests.envs.small import CountEnv, RowsEnv

spaces = gym.spaces
BOX = spaces.Box(0, 9, (2,), np.float32)


class Returns(gym.Env):
    """Steps return the given values, and resets the given observation."""

    action_space = spaces.Discrete(2)

    def __init__(self, space=BOX, first=(0.0, 0.0), **returned):
        self.observation_space = space
        self.first = first
        self.returned = {"observation": self.first, "reward": 0.0, "terminated": False, "truncated": False} | returned

    def reset(self, *, seed=None, options=None):
        return self.first, {}

    def step(self, action):
        return (*self.returned.values(), {})


def makers(**options):
    """Yield the single environment and a batch of two."""
    yield lambda: GymWrapper(Returns(**options))
    create = [lambda: Returns(**options)] * 2
    yield lambda: GymWrapper(SyncVectorEnv(create, copy=False, autoreset_mode=AutoresetMode.DISABLED))


@pytest.mark.parametrize(
    "value", [1, 1.5, np.float64(2.0), np.int8(3), True, np.bool_(1), np.array(2.0), np.array([2.0]), torch.tensor(3)]
)
def test_rewards_that_are_numbers(value):
    reward = GymWrapper(Returns(reward=value)).rand_step()["next", "reward"]
    assert reward.tolist() == [float(np.asarray(value).item())]
    assert reward.dtype == torch.float32


@pytest.mark.parametrize("value", [None, "1.5", 1j, [1.0, 2.0], np.zeros(3), np.zeros(0), {"r": 1}, set()], ids=repr)
def test_rewards_that_are_not(value):
    with pytest.raises(UsageError, match=r"step\(\) of <Returns instance> must return a number as reward, got "):
        GymWrapper(Returns(reward=value)).rand_step()


@pytest.mark.parametrize("value", [True, np.bool_(1), 1, np.array(True), np.array([1]), torch.tensor(True)])
@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_flags(name, value):
    after = GymWrapper(Returns(**{name: value})).rand_step()["next"]
    assert after[name].tolist() == after["done"].tolist() == [True]


@pytest.mark.parametrize("value", [None, "no", "", 2, 1.0, [False, True], np.zeros(2, bool), float("nan")], ids=repr)
@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_flags_that_are_not(name, value):
    with pytest.raises(UsageError, match=rf"must return a bool as {name}, got "):
        GymWrapper(Returns(**{name: value})).rand_step()


class BadRows(RowsEnv):
    """Vector environment of three rows whose steps return the given values."""

    def __init__(self, **returned):
        super().__init__(3, AutoresetMode.DISABLED)
        self.returned = returned

    def step(self, actions):
        observation, reward, terminated, truncated, info = super().step(actions)
        values = {"observation": observation, "reward": reward, "terminated": terminated, "truncated": truncated}
        return (*(values | self.returned).values(), info)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"reward": 1.0}, "must return 3 numbers as reward, one per environment, got 1.0"),
        ({"reward": np.ones(2)}, "3 numbers as reward, one per environment, got array"),
        ({"reward": [1, None, 2]}, "3 numbers as reward, one per environment, got .1, None, 2."),
        ({"terminated": False}, "must return 3 bools as terminated, one per environment, got False"),
        ({"truncated": np.array(["a", "b", "c"])}, "must return 3 bools as truncated"),
        ({"terminated": np.array([0, 1, 2])}, "must return 3 bools as terminated"),
    ],
)
def test_vector_environments_that_return_something_else(returned, words):
    with pytest.raises(UsageError, match=words):
        GymWrapper(BadRows(**returned)).rand_step()


def test_vector_environments_may_return_columns():
    after = GymWrapper(BadRows(reward=np.ones((3, 1)), terminated=np.ones((3, 1), np.int64))).rand_step()["next"]
    assert after["reward"].shape == after["terminated"].shape == (3, 1)


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (BOX, np.zeros(2), np.zeros(3, np.float32)),
        (BOX, [0, 1], np.zeros((1, 2), np.float32)),
        (BOX, np.array([True, False]), np.zeros(2) * 1j),
        (BOX, np.zeros(2, np.uint8), None),
        (BOX, (0.0, 1.0), ["a", "b"]),
        (BOX, np.zeros(2, np.float16), [[1.0], [1.0, 2.0]]),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([1, 255], np.uint8), np.array([1, 256])),
        (spaces.Box(0, 255, (2,), np.uint8), np.zeros(2, np.uint8), np.array([1.0, 2.0])),
        (spaces.Box(-9, 9, (2,), np.int64), np.array([1, 2], np.int8), np.array([1.5, 2])),
        (spaces.Discrete(3), 2, 3),
        (spaces.Discrete(3, start=5), np.int64(7), 4),
        (spaces.Discrete(3), 0, -1),
        (spaces.Discrete(3), np.array(1), 1.0),
        (spaces.Discrete(3), 1, None),
        (spaces.MultiBinary(2), np.array([0, 1]), np.array([0, 1000])),
        (spaces.MultiBinary(2), np.array([True, False]), "ab"),
        (spaces.MultiDiscrete([2, 3]), [1, 2], [1, 2, 0]),
        (spaces.Dict(a=BOX), {"a": np.zeros(2)}, {"b": np.zeros(2)}),
        (spaces.Dict(a=BOX), {"a": np.zeros(2), "more": 3}, np.zeros(2)),
        (spaces.Dict(a=spaces.Dict(b=BOX)), {"a": {"b": np.zeros(2)}}, {"a": np.zeros(2)}),
    ],
    ids=repr,
)
def test_observations_that_are_not_in_their_space(space, good, bad):
    single, vector = makers(space=space, first=good)
    assert single().rollout(2)["next", "reward"].shape == (2, 1)
    assert vector().rollout(2)["next", "reward"].shape == (2, 2, 1)
    for options in ({"first": bad}, {"first": good, "observation": bad}):
        single, _ = makers(space=space, **options)
        with pytest.raises(ArgumentError, match="An observation must fit the observation space") as caught:
            single().rand_step()
        assert "Returns instance" in str(caught.value)
        assert len(str(caught.value)) < 500


def test_integers_of_another_type_that_fit():
    env = GymWrapper(Returns(space=spaces.Box(0, 255, (2,), np.uint8), first=np.array([3, 255])))
    assert env.reset()["observation"].tolist() == [3, 255]
    assert env.reset()["observation"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("space", "bad"),
    [
        (BOX, np.zeros(3, np.float32)),
        (BOX, np.zeros(2) * 1j),
        (BOX, ["a", "b"]),
        (spaces.Dict(a=BOX), {"b": np.zeros(2)}),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([1.0, 2.0])),
    ],
    ids=repr,
)
def test_observations_that_gymnasium_can_not_batch(space, bad):
    good = space.sample()
    for options in ({"first": bad}, {"first": good, "observation": bad}):
        _, vector = makers(space=space, **options)
        with pytest.raises(ArgumentError, match="An observation must fit the observation space"):
            vector().rand_step()


def test_errors_of_the_environment_are_its_own():
    class Broken(CountEnv):
        def step(self, action):
            raise ValueError("the wheel came off")

    for env in (GymWrapper(Broken()), GymWrapper(SyncVectorEnv([Broken], autoreset_mode=AutoresetMode.DISABLED))):
        with pytest.raises(ValueError, match=r"^the wheel came off$"):
            env.rand_step()


class Refusing(RowsEnv):
    """Supports the autoreset modes of the Arcade Learning Environment, and reports others in the same way."""

    made = 0

    def __init__(self, num_envs=1, autoreset_mode=AutoresetMode.NEXT_STEP, **options):
        if autoreset_mode is AutoresetMode.DISABLED:
            raise ValueError(f"Invalid autoreset_mode: {autoreset_mode.value}")
        if options.pop("broken", False):
            raise ValueError("no such game")
        super().__init__(num_envs, autoreset_mode)
        self.options = options


class NextStepOnly(RowsEnv):
    def __init__(self, num_envs=1, autoreset_mode=AutoresetMode.NEXT_STEP):
        if autoreset_mode is not AutoresetMode.NEXT_STEP:
            raise NotImplementedError("Autoreset can't be changed here")
        super().__init__(num_envs, autoreset_mode)


class Deaf(RowsEnv):
    """Accepts any argument and ignores it."""

    def __init__(self, num_envs=1, **options):
        super().__init__(num_envs, AutoresetMode.NEXT_STEP)


@pytest.fixture
def registered():
    names = {}
    for kind in (Refusing, NextStepOnly, Deaf):
        names[kind] = f"recurl-test/{kind.__name__}-v0"
        gym.register(names[kind], entry_point=CountEnv, vector_entry_point=kind)
    yield names
    for name in names.values():
        del gym.registry[name]


def test_autoreset_modes_are_found_by_asking(registered):
    for name in registered.values():
        assert isinstance(GymEnv(name, num_envs=2).gym_env, SyncVectorEnv)
    for kind, wrapper in ((Refusing, "SameStepVectorEnv"), (NextStepOnly, "SingleRowsVectorEnv")):
        env = GymEnv(registered[kind], num_envs=2, vectorization_mode="vector_entry_point")
        assert type(env.gym_env).__name__ == wrapper
    env = GymEnv(registered[Deaf], num_envs=2, vectorization_mode="vector_entry_point")
    assert type(env.gym_env).__name__ == "SingleRowsVectorEnv"


def test_same_step_found_by_asking_shows_the_true_final_observation(registered):
    env = GymEnv(registered[Refusing], num_envs=2, vectorization_mode="vector_entry_point", game="pong")
    batch = env.rollout(6, break_when_any_done=False)
    assert batch["next", "observation"][..., 0].tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]
    assert batch["observation"][..., 0].tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2]]
    assert env.gym_env.env.unwrapped.options == {"game": "pong"}


def test_other_errors_are_not_taken_for_a_refused_mode(registered):
    with pytest.raises(ValueError, match="no such game"):
        GymEnv(registered[Refusing], num_envs=2, vectorization_mode="vector_entry_point", broken=True)
    with pytest.raises(TypeError, match="colour"):
        GymEnv(registered[NextStepOnly], num_envs=2, vectorization_mode="vector_entry_point", colour=3)


def test_an_environment_with_a_vector_form_only():
    gym.register("recurl-test/Only-v0", vector_entry_point=NextStepOnly)
    try:
        assert type(GymEnv("recurl-test/Only-v0", num_envs=2).gym_env).__name__ == "SingleRowsVectorEnv"
    finally:
        del gym.registry["recurl-test/Only-v0"]


def test_invalid_ids():
    for num_envs in (None, 2):
        with pytest.raises(ArgumentTypeError, match=r"takes the id .* got <.*CountEnv.*Wrap .* with GymWrapper\(env\)"):
            GymEnv(CountEnv(), num_envs=num_envs)
        with pytest.raises(ArgumentTypeError, match=r"such as 'CartPole-v1', got 3\.$"):
            GymEnv(3, num_envs=num_envs)


def test_a_module_that_can_not_be_imported():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for num_envs in (None, 2):
            with pytest.raises(ArgumentError, match="Gymnasium can't create 'no_such_module:Env-v0'"):
                GymEnv("no_such_module:Env-v0", num_envs=num_envs)
