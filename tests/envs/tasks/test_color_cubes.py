from __future__ import annotations

import numpy as np
import pytest

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.envs.tasks import ColorCubesEnv, ColorCubesVectorEnv
from recurl.envs.tasks.color_cubes import COLLECT

UP, DOWN, LEFT, RIGHT = range(4)


class Seen:
    """Parts of an observation: row, column, target, the cell of each cube (-1 if not shown), and the cells shown."""

    def __init__(self, observation, size=5, cubes=3):
        grid, begin = size**2, 2 * size + cubes
        self.row, self.column = observation[:, :size].argmax(1), observation[:, size : 2 * size].argmax(1)
        self.size = size
        self.target = observation[:, 2 * size : begin].argmax(1)
        maps = observation[:, begin : begin + cubes * grid].reshape(-1, cubes, grid)
        self.cells = np.where(maps.any(2), maps.argmax(2), -1)
        self.occupied = observation[:, begin + cubes * grid :]


def towards(seen, cells, otherwise):
    """Return actions that lead to the target's cell and collect it there, or others where it is unknown."""
    size = seen.size
    goal = cells[np.arange(len(cells)), seen.target]
    up, left = goal // size - seen.row, goal % size - seen.column
    known = np.where(up < 0, UP, np.where(up > 0, DOWN, np.where(left < 0, LEFT, np.where(left > 0, RIGHT, COLLECT))))
    return np.where(goal < 0, otherwise, known)


def updated(cells, seen):
    """Return a map in memory after an observation, also one that hides colors: one cube at most has moved."""
    cells = np.where(seen.cells >= 0, seen.cells, cells)
    for row in np.flatnonzero(seen.occupied.any(1)) if seen.occupied.size else ():
        now = set(np.flatnonzero(seen.occupied[row]).tolist())
        moved = [cube for cube, cell in enumerate(cells[row]) if cell not in now]
        for cube in moved:
            (cells[row, cube],) = now - set(cells[row].tolist())
    return cells


def returns(memory, num_envs, size=5, cubes=3, **kwargs):
    """Return the returns of one episode per row, of a player that remembers all cubes or none."""
    env = ColorCubesVectorEnv(num_envs, size, cubes, autoreset_mode="SameStep", **kwargs)
    observation, _ = env.reset(seed=0)
    cells, total = np.full((num_envs, cubes), -1), np.zeros(num_envs)
    running = np.ones(num_envs, dtype=bool)
    while running.any():
        seen = Seen(observation, size, cubes)
        cells = updated(cells, seen) if memory else seen.cells
        pair = np.where((seen.column % 2 == 1), LEFT, RIGHT)  # at the last column, into the wall
        observation, reward, terminated, truncated, _ = env.step(towards(seen, cells, pair))
        total += reward * running
        running &= ~(terminated | truncated)
    return total


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"max_episode_steps": 45},
        {"hide_colors": True},
        {"teleport": 1.0},
        {"size": 2, "cubes": 1, "targets": 1},
        {"size": 8, "cubes": 5, "targets": 4, "teleport": 0.5, "hide_colors": True},
    ],
)
def test_a_map_in_memory_is_optimal(kwargs):
    total = returns(True, 200, **kwargs)
    np.testing.assert_allclose(total, ColorCubesVectorEnv.optimal_return(**kwargs), rtol=1e-12)


def test_what_the_best_known_policy_without_memory_gains():
    total = returns(False, 2000)
    assert total.mean() == pytest.approx(ColorCubesVectorEnv.memoryless_return(), abs=0.02)


def begun(cells, agent, colors, **kwargs):
    env = ColorCubesVectorEnv(1, 3, 2, len(colors), autoreset_mode="Disabled", **kwargs)
    env.reset(seed=0)
    state = env.get_state()
    state["cells"][:, 0], state["agent"][0], state["colors"][:, 0] = cells, agent, [*colors, 0]
    state["luck"][:] = 1.0
    state["jumps"][:] = 2
    env.set_state(state)
    return env


def test_worked_by_hand():
    env = begun(cells=[1, 5], agent=0, colors=[0, 1])
    came = [env.step([action]) for action in (COLLECT, UP, RIGHT, COLLECT, RIGHT, DOWN, COLLECT)]
    seen = [Seen(step[0], 3, 2) for step in came]
    assert [(int(one.row[0]), int(one.column[0])) for one in seen] == [(0, c) for c in (0, 0, 1, 1, 2)] + [(1, 2)] * 2
    assert [int(one.target[0]) for one in seen[:-1]] == [0, 0, 0, 1, 1, 1]
    # Free cells of 1 and 5 are 0, 2, 3, ...: the jump to the third is to cell 3; then those of 3 and 5, to cell 2.
    assert [one.cells[0].tolist() for one in seen] == [[-1, -1]] * 3 + [[3, 5]] + [[-1, -1]] * 2 + [[3, 2]]
    np.testing.assert_allclose([step[1][0] for step in came], [-0.05, 0, 0, 0.5, 0, 0, 0.5])
    assert [bool(step[2][0]) for step in came] == [False] * 6 + [True]


def test_a_teleport_moves_another_cube_and_never_the_target():
    env = begun(cells=[1, 5], agent=0, colors=[1, 1])
    state = env.get_state()
    state["luck"][1] = 0.05
    env.set_state(state)
    shown = [Seen(env.step([UP])[0], 3, 2).cells[0].tolist() for _ in range(3)]
    assert shown == [[-1, -1], [3, 5], [-1, -1]]


def test_hidden_colors_are_shown_first():
    env = begun(cells=[1, 5], agent=1, colors=[0, 1], hide_colors=True)
    first = Seen(env.reset(seed=3)[0], 3, 2)
    assert (first.cells >= 0).all()
    assert not first.occupied.any()
    env = begun(cells=[1, 5], agent=1, colors=[0, 1], hide_colors=True)
    after = Seen(env.step([COLLECT])[0], 3, 2)
    assert after.cells.tolist() == [[-1, -1]]
    assert np.flatnonzero(after.occupied[0]).tolist() == [3, 5]


def test_jumps_are_uniform_over_free_cells():
    env = ColorCubesVectorEnv(4000, 3, 2, 2, teleport=1.0)
    env.reset(seed=0)
    before = env.state["cells"].copy()
    other = 1 - env.state["colors"][0]
    env.step(np.zeros(4000, dtype=np.int64))
    after = env.state["cells"]
    rows = np.arange(4000)
    assert (after[other, rows] != before[other, rows]).all()
    assert (after[1 - other, rows] == before[1 - other, rows]).all()
    assert (after[0] != after[1]).all()
    np.testing.assert_allclose(np.bincount(after[other, rows], minlength=9) / 4000, 1 / 9, atol=0.02)


def test_cubes_and_agent_begin_on_different_cells():
    env = ColorCubesVectorEnv(500, 3, 4)
    env.reset(seed=0)
    assert all(len(set(column)) == 5 for column in np.vstack((env.state["cells"], env.state["agent"])).T.tolist())


def test_truncated_at_the_step_limit():
    env = ColorCubesVectorEnv(1, 2, 1, 1, autoreset_mode="Disabled")
    env.reset(seed=0)
    assert [bool(env.step([UP])[3][0]) for _ in range(6)] == [False] * 5 + [True]


def test_returns_that_are_not_known():
    with pytest.raises(UnsupportedError, match="known from 45 steps on; got max_episode_steps=44"):
        ColorCubesVectorEnv.optimal_return(max_episode_steps=44)
    with pytest.raises(UnsupportedError, match="measured with its default arguments only"):
        ColorCubesVectorEnv.memoryless_return(cubes=2)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"size": 1}, "size must be an integer of at least 2; got 1"),
        ({"cubes": 0}, "cubes must be an integer of at least 1; got 0"),
        ({"cubes": 13}, "cubes must be fewer than half of the 25 cells; got 13"),
        ({"targets": 0}, "targets must be an integer of at least 1; got 0"),
        ({"teleport": 1.5}, "teleport must be a probability from 0 to 1; got 1.5"),
        ({"teleport": True}, "teleport must be a probability from 0 to 1; got True"),
        ({"hide_colors": 2}, "hide_colors must be True or False; got 2"),
        ({"max_episode_steps": 0}, "max_episode_steps must be an integer of at least 1; got 0"),
    ],
)
def test_arguments_are_checked(kwargs, words):
    for cls in (ColorCubesEnv, ColorCubesVectorEnv):
        with pytest.raises(ArgumentError, match=words):
            cls(**kwargs)
