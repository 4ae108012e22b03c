from __future__ import annotations

import numpy as np
import pytest

from recurl.core.errors import ArgumentError
from recurl.envs.tasks import RepeatPreviousEnv, RepeatPreviousVectorEnv


def returns(env, policy, seed=0):
    """Return the returns of one episode per row; policy(symbols seen so far [t + 1, num_envs]) -> actions."""
    observations, _ = env.reset(seed=seed)
    seen, total, truncated = [observations.argmax(-1)], 0.0, np.False_
    while not np.all(truncated):
        observations, reward, terminated, truncated, _ = env.step(policy(seen))
        seen.append(observations.argmax(-1))
        total += reward
        assert not terminated.any()
    return total, seen


def test_worked_by_hand():
    env = RepeatPreviousVectorEnv(2, k=2, num_symbols=3, episode_length=5)
    symbols = np.array([[0, 1, 2, 2, 0, 1], [2, 2, 1, 0, 1, 1]])
    first, _ = env.reset(seed=0)
    state = env.get_state()
    state["symbols"][:, 2:] = symbols
    env.set_state(state)

    assert first.dtype == np.float32
    third = 1 / 3
    # The answer at step t is the symbol of step t - 2: [0, 1, 2] in the first row, [2, 2, 1] in the second.
    rewards = [env.step(a) for a in ([0, 2], [1, 2], [0, 0], [1, 2], [0, 1])]
    np.testing.assert_allclose([r[1] for r in rewards], [[0, 0], [0, 0], [third, 0], [third, third], [0, third]])
    np.testing.assert_array_equal([r[0].argmax(-1) for r in rewards], symbols.T[1:])
    np.testing.assert_array_equal([r[0].sum(-1) for r in rewards], np.ones((5, 2)))
    np.testing.assert_array_equal([r[3] for r in rewards], [[False] * 2] * 4 + [[True] * 2])


@pytest.mark.parametrize(("k", "episode_length"), [(1, 64), (4, 64), (8, 64), (512, 1024)])
def test_memory_reaches_the_optimal_return(k, episode_length):
    env = RepeatPreviousVectorEnv(16, k=k, episode_length=episode_length)
    total, _ = returns(env, lambda seen: seen[-1 - k] if len(seen) > k else np.zeros(16, dtype=np.int64))
    np.testing.assert_allclose(total, env.optimal_return(k=k), rtol=1e-12)


@pytest.mark.parametrize("num_symbols", [2, 4])
@pytest.mark.parametrize("back", [0, 3, 5])
def test_any_other_symbol_is_worth_chance(num_symbols, back):
    """Covers the current symbol (no memory), and every symbol except the one k steps ago."""
    env = RepeatPreviousVectorEnv(500, k=4, num_symbols=num_symbols)
    total, _ = returns(env, lambda seen: seen[-1 - back] if len(seen) > back else np.zeros(500, dtype=np.int64))
    assert total.mean() == pytest.approx(env.memoryless_return(num_symbols=num_symbols), abs=0.01)


def test_symbols_are_uniform_and_independent():
    env = RepeatPreviousVectorEnv(400, k=4)
    _, seen = returns(env, lambda seen: np.zeros(400, dtype=np.int64))
    seen = np.array(seen)
    for lag in (1, 4, 5):
        pairs = np.bincount((seen[lag:] * 4 + seen[:-lag]).ravel(), minlength=16) / seen[lag:].size
        np.testing.assert_allclose(pairs, 1 / 16, atol=0.01)


def test_every_episode_shows_other_symbols():
    env = RepeatPreviousEnv()
    first = [env.reset(seed=0)[0], *(env.step(0)[0] for _ in range(20))]
    second = [env.reset()[0], *(env.step(0)[0] for _ in range(20))]
    assert not np.array_equal(first, second)


def test_arguments_are_checked():
    for cls in (RepeatPreviousEnv, RepeatPreviousVectorEnv):
        with pytest.raises(ArgumentError, match="k must be an integer of at least 1"):
            cls(k=0)
        with pytest.raises(ArgumentError, match="num_symbols must be an integer of at least 2"):
            cls(num_symbols=1)
        with pytest.raises(ArgumentError, match="must be more than k; got episode_length=4 and k=4"):
            cls(episode_length=4)
