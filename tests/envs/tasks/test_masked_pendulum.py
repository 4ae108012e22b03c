from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from recurl.core.errors import ArgumentError
from recurl.envs.tasks import MaskedPendulumEnv, MaskedPendulumVectorEnv
from recurl.envs.tasks.base import check_vectors


def test_states_are_pendulums_to_the_last_bit():
    masked = MaskedPendulumVectorEnv(4, autoreset_mode="SameStep")
    full = [gymnasium.make("Pendulum-v1") for _ in range(4)]
    rng = np.random.default_rng(0)
    observations = masked.reset(seed=3)[0]
    expected = np.stack([env.reset(seed=3 + row)[0] for row, env in enumerate(full)])
    np.testing.assert_array_equal(observations, expected[:, :2])
    for step in range(200):
        actions = rng.uniform(-2.5, 2.5, (4, 1)).astype(np.float32)
        observations, reward, terminated, truncated, info = masked.step(actions)
        came = [env.step(action) for env, action in zip(full, actions, strict=True)]
        shown = np.stack(info["final_obs"]) if step == 199 else observations
        np.testing.assert_array_equal(shown, np.stack([row[0] for row in came])[:, :2])
        np.testing.assert_allclose(reward, [row[1] for row in came], rtol=1e-7, atol=1e-9)
        assert terminated.tolist() == [row[2] for row in came]
        assert truncated.tolist() == [row[3] for row in came] == [step == 199] * 4


def swing_up(angle, velocity):
    """Return torques for angles and velocities: pump energy until there is enough, then hold."""
    energy = 0.5 * velocity**2 + 15 * (np.cos(angle) - 1)
    hold = -10 * np.sin(angle) - 3 * velocity
    pump = -0.3 * energy * velocity - 0.02 * np.sign(velocity)
    return np.clip(np.where(np.cos(angle) > 0.9, hold, pump), -2, 2)


def mean_return(policy, rows=300):
    env = MaskedPendulumVectorEnv(rows, autoreset_mode="SameStep")
    shown = env.reset(seed=0)[0]
    before, total = None, np.zeros(rows)
    for _ in range(200):
        angle = np.arctan2(shown[:, 1], shown[:, 0])
        shift = np.zeros(rows) if before is None else (angle - before + np.pi) % (2 * np.pi) - np.pi
        before = angle
        shown, reward, *_ = env.step(policy(angle, shift / 0.05)[:, np.newaxis])
        total += reward
    return total.mean()


def test_two_observations_are_enough_to_swing_up_and_one_is_not():
    remembering = mean_return(swing_up)
    blind = mean_return(lambda angle, velocity: swing_up(angle, np.zeros_like(velocity)))
    assert MaskedPendulumVectorEnv.memoryless_return() / 2 < remembering < MaskedPendulumVectorEnv.optimal_return()
    assert blind < MaskedPendulumVectorEnv.memoryless_return() < remembering


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        ([0.0, 1.0], r"real numbers of shape \(2, 1\); got float64 of shape \(2,\)"),
        ([["a"], ["b"]], "got <U1"),
        ([[0.0], [np.nan]], "must be finite"),
    ],
)
def test_bad_actions_are_refused(actions, text):
    env = MaskedPendulumVectorEnv(2)
    env.reset(seed=0)
    with pytest.raises(ArgumentError, match=text):
        env.step(actions)


def test_bad_actions_of_a_single_environment_are_refused():
    env = MaskedPendulumEnv()
    env.reset(seed=0)
    with pytest.raises(ArgumentError, match=r"of shape \(1,\); got float64 of shape \(\)"):
        env.step(0.0)


def test_integers_will_do_as_real_numbers():
    assert check_vectors([[1], [2]], (2, 1)).dtype == np.float64


def test_returns_grow_with_the_length():
    assert MaskedPendulumVectorEnv.optimal_return(100) == MaskedPendulumVectorEnv.optimal_return() / 2
    assert MaskedPendulumVectorEnv.memoryless_return(100) == MaskedPendulumVectorEnv.memoryless_return() / 2
