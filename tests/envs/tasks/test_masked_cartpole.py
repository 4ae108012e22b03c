from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from recurl.core.errors import ArgumentError
from recurl.envs.tasks import MaskedCartPoleEnv, MaskedCartPoleVectorEnv


def returns(policy, num_envs, seed=0):
    """Return the returns of one episode per row; policy(previous observations, current ones) -> actions."""
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


def test_a_logistic_policy_of_the_positions_is_far_below_the_memoryless_return():
    rng = np.random.default_rng(0)

    def policy(_, present):
        push_right = 1 / (1 + np.exp(-(present @ [0.54, 30.8])))
        return (rng.random(len(present)) < push_right).astype(np.int64)

    total = returns(policy, 2000)
    assert total.mean() == pytest.approx(51, abs=4)


def test_best_memoryless_policy_found_reaches_the_documented_return():
    # Found by a cross-entropy search: a line and twelve sine waves (per m, per rad, phase, amplitude) of the positions.
    waves = np.array(
        [
            [2.5, -102.9, -2.89, 0.78],
            [-7.0, 211.0, -2.27, 0.06],
            [7.4, -132.9, 2.58, 0.2],
            [-0.8, -420.5, 0.28, -0.09],
            [-1.1, -176.2, -0.25, -7.3],
            [-4.0, -62.9, 0.31, -0.87],
            [-5.2, 269.0, -0.2, -0.19],
            [-1.8, -157.1, -0.27, -2.92],
            [-12.5, -380.5, -9.15, -0.76],
            [25.8, -86.7, 1.1, -0.54],
            [0.0, -157.6, 0.19, -4.75],
            [3.4, 183.8, 3.26, -0.91],
        ]
    )

    def policy(_, present):
        drive = np.sin(present @ waves[:, :2].T + waves[:, 2]) @ waves[:, 3] + present @ [-0.5, 56.3] - 0.1
        return (drive > 0).astype(np.int64)

    bound = MaskedCartPoleVectorEnv.memoryless_return()
    assert returns(policy, 2000).mean() == pytest.approx(bound, rel=0.1)


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
