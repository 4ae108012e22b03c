from functools import partial

import gymnasium as gym
import pytest

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.envs import GymEnv, TensorEnv, check_env_specs
from recurl.envs.from_function import env_from_function
from recurl.envs.tasks import TMaze, TMazeVectorEnv


def single():
    return gym.make("CartPole-v1")


def own():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def batch(num_envs):
    return GymEnv("CartPole-v1", num_envs)


@pytest.mark.parametrize("make", [single, own, batch])
def test_requested_number_of_rows(make):
    env = env_from_function(make, 3)
    assert env.batch_size == (3,)
    env.set_seed(0)
    assert env.reset()["observation"].unique(dim=0).shape == (3, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_environments")
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


def test_a_single_one():
    for make in (single, own, lambda **options: gym.make("CartPole-v1", **options), partial(TMaze, 3)):
        assert env_from_function(make, None).batch_size == ()
    assert env_from_function(batch, None).batch_size == (1,)


@pytest.mark.parametrize(("mode", "device"), [(None, "cpu"), ("vector_entry_point", "cpu"), ("device", "cpu")])
def test_a_task_by_its_dynamics(mode, device):
    env = env_from_function(TMaze, 3, vectorization_mode=mode, device=device, corridor_length=2)
    assert isinstance(env, TensorEnv) == (mode == "device")
    assert env.batch_size == (3,)
    check_env_specs(env)


def test_a_single_one_shows_itself():
    env = env_from_function(partial(gym.make, "recurl/TMaze-v0"), None, render_mode="rgb_array")
    env.reset()
    assert env.gym_env.render().shape == (120, 300, 3)
    with pytest.raises(
        ArgumentError, match="creates one with None: give the function a parameter render_mode and pass"
    ):
        env_from_function(single, None, render_mode="rgb_array")


@pytest.mark.parametrize("options", [{"drop_observations": ["a"]}, {"action_mask": "legal"}])
def test_environments_with_entries_of_their_own(options):
    with pytest.raises(ArgumentError, match="are for Gymnasium environments, but the function creates recurl"):
        env_from_function(own, 2, **options)
    with pytest.raises(ArgumentError, match=r"'a'|are for Gymnasium environments, but the function creates recurl"):
        env_from_function(TMaze, 2, vectorization_mode="device", **options)
    with pytest.raises(ArgumentError, match=r"'a'|'legal'"):
        env_from_function(TMaze, 2, **options)


def test_invalid_results_of_the_function():
    one, other = single(), own()
    for same in (one, other):
        with pytest.raises(ArgumentError, match="must create a new one at every call"):
            env_from_function(lambda same=same: same, 2)
    with pytest.raises(ArgumentTypeError, match=r"must create a gymnasium\.Env, .* got builtins\.int"):
        env_from_function(int, 2)
    with pytest.raises(
        ArgumentError, match=r"for single Gymnasium environments, but the function creates recurl\.envs"
    ):
        env_from_function(own, 2, vectorization_mode="sync")
    with pytest.raises(ArgumentError, match=r"needs a Gymnasium id, .* use sync or async"):
        env_from_function(single, 2, vectorization_mode="vector_entry_point")
