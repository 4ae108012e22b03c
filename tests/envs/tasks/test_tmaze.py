from __future__ import annotations

import numpy as np
import pytest

from recurl.core.errors import ArgumentError
from recurl.envs.tasks import TMazeEnv, TMazeVectorEnv
from recurl.envs.tasks.tmaze import FORWARD, LEFT, RIGHT

CORRIDOR, JUNCTION = [0, 0, 1, 0], [0, 0, 0, 1]
CUES = {LEFT: [1, 0, 1, 0], RIGHT: [0, 1, 1, 0]}


def started(cue, **kwargs):
    env = TMazeEnv(**kwargs)
    seed = 0
    while env.reset(seed=seed)[0].tolist() != CUES[cue]:
        seed += 1
    return env


def returns(policy, num_envs=4000, **kwargs):
    """Return the returns of one episode per row; policy(first observations, current ones) -> actions."""
    env = TMazeVectorEnv(num_envs, autoreset_mode="SameStep", **kwargs)
    first, _ = env.reset(seed=0)
    observations, total, running = first, np.zeros(num_envs), np.ones(num_envs, dtype=bool)
    while running.any():
        observations, reward, terminated, truncated, _ = env.step(policy(first, observations))
        total += reward * running
        running &= ~(terminated | truncated)
    return total


@pytest.mark.parametrize("cue", [LEFT, RIGHT])
@pytest.mark.parametrize("turn", [LEFT, RIGHT])
def test_worked_by_hand(cue, turn):
    env = started(cue, corridor_length=2)
    came = [env.step(action) for action in (LEFT, FORWARD, RIGHT, FORWARD, FORWARD, turn)]
    assert [step[0].tolist() for step in came] == [CORRIDOR] * 3 + [JUNCTION] * 3
    assert [step[1] for step in came] == [-0.1, 0.0, -0.1, 0.0, -0.1, float(turn == cue)]
    assert [step[2] for step in came] == [False] * 5 + [True]
    assert not any(step[3] for step in came)


@pytest.mark.parametrize(("kwargs", "limit"), [({}, 12), ({"max_episode_steps": 5}, 5)])
def test_truncated_at_the_step_limit(kwargs, limit):
    env = started(LEFT, corridor_length=2, **kwargs)
    came = [env.step(RIGHT) for _ in range(limit)]
    assert [step[3] for step in came] == [False] * (limit - 1) + [True]
    assert not any(step[2] for step in came)


@pytest.mark.parametrize("corridor_length", [1, 20, 1000])
def test_memory_reaches_the_optimal_return(corridor_length):
    def policy(first, present):
        return np.where(present[:, 3] == 1, np.where(first[:, 0] == 1, LEFT, RIGHT), FORWARD)

    total = returns(policy, 16, corridor_length=corridor_length)
    np.testing.assert_array_equal(total, TMazeVectorEnv.optimal_return(corridor_length=corridor_length))


@pytest.mark.parametrize("left", [0.0, 0.3, 1.0])
def test_without_memory_half_of_it(left):
    rng = np.random.default_rng(0)

    def policy(_, present):
        turn = np.where(rng.random(len(present)) < left, LEFT, RIGHT)
        return np.where(present[:, 3] == 1, turn, FORWARD)

    assert returns(policy).mean() == pytest.approx(TMazeVectorEnv.memoryless_return(), abs=0.03)


def test_acting_at_random_finds_the_junction():
    rng = np.random.default_rng(0)
    env = TMazeVectorEnv(1000)
    env.reset(seed=0)
    reached = np.zeros(1000, dtype=bool)
    for _ in range(83):
        reached |= env.step(rng.integers(3, size=1000))[0][:, 3] == 1
    assert reached.mean() > 0.95


def test_cues_are_even():
    cues, _ = TMazeVectorEnv(4000).reset(seed=0)
    assert cues[:, 0].mean() == pytest.approx(0.5, abs=0.03)


def test_a_limit_that_hides_the_junction_leaves_nothing_to_gain():
    assert TMazeVectorEnv.optimal_return(corridor_length=5, max_episode_steps=6) == 1.0
    assert TMazeVectorEnv.optimal_return(corridor_length=5, max_episode_steps=5) == 0.0
    assert TMazeVectorEnv.memoryless_return(corridor_length=5, max_episode_steps=5) == 0.0


def test_arguments_are_checked():
    for cls in (TMazeEnv, TMazeVectorEnv):
        with pytest.raises(ArgumentError, match="corridor_length must be an integer of at least 1"):
            cls(corridor_length=0)
        with pytest.raises(ArgumentError, match="max_episode_steps must be an integer of at least 1"):
            cls(max_episode_steps=0)
