from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from recurl.envs.tasks import MaskedCartPoleEnv, MaskedCartPoleVectorEnv
from recurl.errors import ArgumentError


def returns(policy, num_envs, seed=0):
    """Return of one episode in each row; policy(previous observations, present ones) -> actions."""
    env = MaskedCartPoleVectorEnv(num_envs, autoreset_mode="SameStep")
    observations, _ = env.reset(seed=seed)
    previous, total, running = observations, np.zeros(num_envs), np.ones(num_envs, dtype=bool)
    while running.any():
        actions = policy(previous, observations)
        previous = observations
        observations, reward, terminated, truncated, _ = env.step(actions)
        total += reward * running
        running &= ~(terminated | truncated)
    return total


def test_single_is_cartpole_with_the_velocities_hidden():
    masked, full = gymnasium.make("recurl/MaskedCartPole-v1"), gymnasium.make("CartPole-v1")
    rng = np.random.default_rng(0)
    for seed in range(5):
        np.testing.assert_array_equal(masked.reset(seed=seed)[0], full.reset(seed=seed)[0][[0, 2]])
        ended = False
        while not ended:
            action = int(rng.integers(2))
            observation, *rest = full.step(action)
            hidden, *masked_rest = masked.step(action)
            np.testing.assert_array_equal(hidden, observation[[0, 2]])
            assert masked_rest == rest
            ended = rest[1] or rest[2]


def test_vector_dynamics_are_cartpoles_to_the_last_bit():
    rng = np.random.default_rng(0)
    states = rng.uniform(-1, 1, size=(4, 300)) * np.array([[2.6], [3.0], [0.25], [3.0]])
    actions = rng.integers(2, size=300)
    env = MaskedCartPoleVectorEnv(300, autoreset_mode="Disabled")
    env.reset(seed=0)
    env.set_state(env.get_state() | {"physical": states})
    observations, reward, terminated, truncated, _ = env.step(actions)
    after = env.get_state()["physical"]

    single = CartPoleEnv()
    single.reset(seed=0)
    for row in range(300):
        single.state, single.steps_beyond_terminated = states[:, row], None
        observation, single_reward, single_terminated, _, _ = single.step(int(actions[row]))
        np.testing.assert_array_equal(after[:, row], single.state)
        np.testing.assert_array_equal(observations[row], observation[[0, 2]])
        assert (reward[row], terminated[row]) == (single_reward, single_terminated)
    assert not truncated.any()
    assert 20 < terminated.sum() < 280


def test_memory_of_one_observation_reaches_the_optimal_return():
    def policy(previous, present):
        velocity = (present - previous) / 0.02
        drive = present @ [0.1, 1.0] + velocity @ [0.2, 0.3]
        return (drive > 0).astype(np.int64)

    np.testing.assert_array_equal(returns(policy, 50), MaskedCartPoleVectorEnv.optimal_return())


def test_step_limit():
    env = MaskedCartPoleEnv(max_episode_steps=3)
    for _ in range(2):
        env.reset(seed=0)
        assert [env.step(step % 2)[2:4] for step in range(3)] == [(False, False), (False, False), (False, True)]
    assert MaskedCartPoleVectorEnv.optimal_return(max_episode_steps=3) == 3.0
    assert MaskedCartPoleVectorEnv.memoryless_return(max_episode_steps=3) == 3.0
    for cls in (MaskedCartPoleEnv, MaskedCartPoleVectorEnv):
        with pytest.raises(ArgumentError, match="max_episode_steps must be an integer of at least 1"):
            cls(max_episode_steps=0)


def test_a_fallen_pole_is_saved_as_fallen():
    env, other = MaskedCartPoleEnv(), MaskedCartPoleEnv()
    env.reset(seed=0)
    while not env.step(1)[2]:
        pass
    other.set_state(env.get_state())
    assert other.steps_beyond_terminated == 0
