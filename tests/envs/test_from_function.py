from functools import partial

import gymnasium as gym
import pytest

from recurl.envs import GymEnv
from recurl.envs.from_function import env_from_function
from recurl.envs.tasks import TMazeVectorEnv
from recurl.errors import ArgumentError, ArgumentTypeError


def single():
    return gym.make("CartPole-v1")


def own():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def batch(num_envs):
    return GymEnv("CartPole-v1", num_envs)


@pytest.mark.parametrize("make", [single, own, batch])
def test_as_many_rows_as_asked_for(make):
    env = env_from_function(make, 3)
    assert env.batch_size == (3,)
    env.set_seed(0)
    assert env.reset()["observation"].unique(dim=0).shape == (3, 4)


@pytest.mark.slow
def test_arguments_modes_and_wrappers():
    with env_from_function(single, 2, vectorization_mode="async", wrappers=[gym.wrappers.FlattenObservation]) as env:
        assert env.reset().batch_size == (2,)
    make = partial(TMazeVectorEnv, autoreset_mode="Disabled")
    assert env_from_function(lambda **options: make(2, **options), 9, corridor_length=3).batch_size == (2,)
    assert env_from_function(make, 5).batch_size == (5,)
    assert env_from_function(single, 2, wrappers=[lambda env: gym.wrappers.TimeLimit(env, 2)]).rollout(9).shape == (
        2,
        2,
    )


def test_what_cannot_be_used():
    one, other = single(), own()
    for same in (one, other):
        with pytest.raises(ArgumentError, match="must make a new one at every call"):
            env_from_function(lambda same=same: same, 2)
    with pytest.raises(ArgumentTypeError, match=r"must make a gymnasium\.Env, .* got builtins\.int"):
        env_from_function(int, 2)
    with pytest.raises(ArgumentError, match=r"for single Gymnasium environments, but the function makes recurl\.envs"):
        env_from_function(own, 2, vectorization_mode="sync")
    with pytest.raises(ArgumentError, match=r"needs a Gymnasium id, .* take sync or async"):
        env_from_function(single, 2, vectorization_mode="vector_entry_point")
