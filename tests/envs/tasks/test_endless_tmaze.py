from __future__ import annotations

import numpy as np
import pytest

from recurl.core.errors import ArgumentError
from recurl.envs.tasks import EndlessTMazeEnv, EndlessTMazeVectorEnv
from recurl.envs.tasks.tmaze import FORWARD, LEFT, RIGHT

CORRIDOR, JUNCTION = [0, 0, 1, 0], [0, 0, 0, 1]
CUES = {LEFT: [1, 0, 1, 0], RIGHT: [0, 1, 1, 0]}


def returns(turn_of, num_envs=4000, **kwargs):
    """Return the returns of one episode per row; turn_of(all observations so far) -> turns at the junction."""
    env = EndlessTMazeVectorEnv(num_envs, autoreset_mode="SameStep", **kwargs)
    seen = [env.reset(seed=0)[0]]
    total, running = np.zeros(num_envs), np.ones(num_envs, dtype=bool)
    while running.any():
        at_junction = seen[-1][:, 3] == 1
        observations, reward, terminated, truncated, _ = env.step(np.where(at_junction, turn_of(seen), FORWARD))
        total += reward * running
        running &= ~(terminated | truncated)
        seen.append(observations)
    return total


def latest_cue(seen):
    turns = np.zeros(len(seen[0]), dtype=np.int64)
    for observation in seen:
        turns = np.where(observation[:, 0] == 1, LEFT, np.where(observation[:, 1] == 1, RIGHT, turns))
    return turns


def first_cue(seen):
    return np.where(seen[0][:, 0] == 1, LEFT, RIGHT)


def begun(cues, lengths):
    env = EndlessTMazeVectorEnv(1, corridor_length=3, corridors=len(cues), autoreset_mode="Disabled")
    env.reset(seed=0)
    state = env.get_state()
    state["cues"][:, 0], state["lengths"][:, 0] = cues, lengths
    env.set_state(state)
    return env


def test_worked_by_hand():
    env = begun([0, 1], [2, 1])  # left, right
    came = [env.step([action]) for action in (RIGHT, FORWARD, FORWARD, FORWARD, LEFT, FORWARD, RIGHT)]
    right = CUES[RIGHT]
    expected = [CUES[LEFT], CORRIDOR, JUNCTION, JUNCTION, right, JUNCTION]
    assert [step[0][0].tolist() for step in came[:-1]] == expected
    np.testing.assert_allclose([step[1][0] for step in came], [-0.05, 0, 0, -0.05, 0.5, 0, 0.5])
    assert [bool(step[2][0]) for step in came] == [False] * 6 + [True]
    assert not any(step[3][0] for step in came)


def test_a_wrong_turn_ends_the_episode():
    env = begun([0, 1], [1, 1])
    came = [env.step([action]) for action in (FORWARD, RIGHT)]
    assert [(step[1][0], bool(step[2][0])) for step in came] == [(0.0, False), (0.0, True)]


@pytest.mark.parametrize("kwargs", [{}, {"corridor_length": 100, "corridors": 3}, {"random_lengths": True}])
def test_remembering_the_latest_cue_is_optimal(kwargs):
    total = returns(latest_cue, 64, **kwargs)
    np.testing.assert_allclose(total, EndlessTMazeVectorEnv.optimal_return(**kwargs), rtol=1e-12)


@pytest.mark.parametrize("kwargs", [{}, {"corridors": 2, "corridor_length": 3}, {"random_lengths": True}])
@pytest.mark.parametrize("left", [0.0, 0.3])
def test_without_memory_half_of_the_turns_are_right(kwargs, left):
    rng = np.random.default_rng(0)
    total = returns(lambda seen: np.where(rng.random(len(seen[0])) < left, LEFT, RIGHT), **kwargs)
    assert total.mean() == pytest.approx(EndlessTMazeVectorEnv.memoryless_return(**kwargs), abs=0.015)


def test_retention_without_rewriting_passes_one_corridor_for_sure():
    assert returns(first_cue).mean() == pytest.approx((2 - 2**-4) / 5, abs=0.015)


@pytest.mark.parametrize("random_lengths", [False, True])
@pytest.mark.parametrize("limit", [5, 17, 30, 55])
def test_what_the_step_limit_leaves(random_lengths, limit):
    kwargs = {"random_lengths": random_lengths, "max_episode_steps": limit}
    total = returns(latest_cue, **kwargs)
    assert total.mean() == pytest.approx(EndlessTMazeVectorEnv.optimal_return(**kwargs), abs=0.01)


def test_lengths_are_uniform():
    env = EndlessTMazeVectorEnv(2000, corridor_length=4, random_lengths=True)
    env.reset(seed=0)
    counts = np.bincount(env.state["lengths"].ravel(), minlength=5)
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:] / counts.sum(), 0.25, atol=0.02)


def test_truncated_at_the_step_limit():
    env = EndlessTMazeVectorEnv(1, corridor_length=1, corridors=2, autoreset_mode="Disabled")
    env.reset(seed=0)
    assert [bool(env.step([LEFT])[3][0]) for _ in range(16)] == [False] * 15 + [True]


def test_arguments_are_checked():
    for cls in (EndlessTMazeEnv, EndlessTMazeVectorEnv):
        for name in ("corridor_length", "corridors", "max_episode_steps"):
            with pytest.raises(ArgumentError, match=f"{name} must be an integer of at least 1; got 0"):
                cls(**{name: 0})
        with pytest.raises(ArgumentError, match="random_lengths must be True or False; got 'uniform'"):
            cls(random_lengths="uniform")
