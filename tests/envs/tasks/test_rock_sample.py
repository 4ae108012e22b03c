from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.envs.tasks import RockSample, RockSampleEnv, RockSampleVectorEnv
from recurl.envs.tasks.rock_sample import CHECK, SAMPLE

NORTH, EAST, SOUTH, WEST = range(4)
ROUTE = {  # of the best known player without memory in the default layout: the move from each cell
    (3, 0): SOUTH,
    (4, 0): SOUTH,
    (5, 0): SOUTH,
    (6, 0): EAST,
    (6, 1): NORTH,
    (5, 1): NORTH,
    (4, 1): NORTH,
    (3, 1): NORTH,
    (2, 1): EAST,
    (2, 2): NORTH,
    (1, 2): EAST,
    (1, 3): SOUTH,
    (2, 3): SOUTH,
    (3, 3): SOUTH,
    (4, 3): EAST,
    (4, 4): EAST,
    (4, 5): SOUTH,
    (5, 5): EAST,
    (5, 6): EAST,
}


def returns(env, act):
    """Return the returns of one episode per row; act(cells [num_envs, 2], readings [num_envs, rocks]) -> actions."""
    size = env.dynamics.size
    observation, _ = env.reset(seed=0)
    total, running = np.zeros(env.num_envs), np.ones(env.num_envs, dtype=bool)
    while running.any():
        cells = np.stack((observation[:, :size].argmax(1), observation[:, size : 2 * size].argmax(1)), axis=-1)
        observation, reward, terminated, truncated, _ = env.step(act(cells, observation[:, 2 * size :]))
        total += reward * running
        running &= ~(terminated | truncated)
    return total


def test_what_the_best_known_policy_without_memory_gains():
    places = [tuple(place) for place in RockSample().places.tolist()]

    def act(cell, reading):
        if cell in places and cell in ROUTE:
            rock = places.index(cell)
            if reading[rock] == 0:
                return CHECK + rock
            if reading[rock] > 0:
                return SAMPLE
        return ROUTE[cell]

    env = RockSampleVectorEnv(3000, autoreset_mode="SameStep")
    found = returns(
        env, lambda cells, read: np.array([act(tuple(c), r) for c, r in zip(cells.tolist(), read, strict=True)])
    )
    assert found.mean() == pytest.approx(RockSampleVectorEnv.memoryless_return(), abs=0.3)


class Rover:
    """Player that remembers what it read: it checks the next rock of its plan once, and plans again if it is bad."""

    def __init__(self, task, num_envs):
        self.places, self.size, self.discount = task.places, task.size, task.discount
        self.worth = np.full((num_envs, task.rocks), 0.5)  # probability that a rock is good
        self.plan = cache(self._plan)

    def act(self, cells, readings):
        actions = []
        for row, (cell, reading) in enumerate(zip(cells, readings, strict=True)):
            for rock in np.flatnonzero(reading):
                self.worth[row, rock] = reading[rock] > 0
            actions.append(self._action(row, cell))
        return np.array(actions)

    def _action(self, row, cell):
        rock = self.plan(tuple(cell.tolist()), tuple(self.worth[row]))
        if rock is None:
            return EAST
        if self.worth[row, rock] == 0.5:
            return CHECK + rock
        down, right = self.places[rock] - cell
        if down == right == 0:
            self.worth[row, rock] = 0
            return SAMPLE
        return (SOUTH if down > 0 else NORTH) if down else EAST if right > 0 else WEST

    def _plan(self, start, worth):
        """Return the rock to visit next, or None to leave, by the expected value of all orders of visits."""

        @cache
        def best(left, place):
            options = [(10 * self.discount ** (self.size - 1 - place[1]), None)]
            for rock in left:
                others = left - {rock}
                there = tuple(self.places[rock].tolist())
                far = self.discount ** sum(abs(a - b) for a, b in zip(place, there, strict=True))
                good = far * (10 + self.discount * best(others, there)[0])
                if worth[rock] == 0.5:
                    good = self.discount * (good + best(others, place)[0]) / 2
                options.append((good, rock))
            return max(options, key=lambda option: option[0])

        return best(frozenset(rock for rock, chance in enumerate(worth) if chance), start)[1]


def test_remembering_what_was_read_is_worth_more_and_knowing_all_bounds_it():
    env = RockSampleVectorEnv(100, size=5, rocks=5, autoreset_mode="SameStep")
    found = returns(env, Rover(env.dynamics, 100).act).mean()
    bound = RockSampleVectorEnv.optimal_return(size=5, rocks=5)
    assert 19 < found < bound < 26


@pytest.mark.slow
def test_the_default_task_rewards_memory():
    env = RockSampleVectorEnv(300, autoreset_mode="SameStep")
    found = returns(env, Rover(env.dynamics, 300).act).mean()
    assert RockSampleVectorEnv.memoryless_return() + 2 < found < RockSampleVectorEnv.optimal_return()
    assert found == pytest.approx(21.2, abs=0.8)


@pytest.mark.parametrize("discount", [0.9, 1.0])
def test_the_bound_by_all_orders(discount):
    """Compare with an enumeration of the good rocks and of the orders to visit some of them."""
    task = RockSample(4, 3, discount=discount)

    def value(place, left):
        found = 10 * discount ** (3 - place[1])
        for rock in left:
            far = abs(task.places[rock] - place).sum()
            found = max(found, discount**far * (10 + discount * value(task.places[rock], left - {rock})))
        return found

    subsets = [{rock for rock in range(3) if number >> rock & 1} for number in range(8)]
    expected = np.mean([value(np.array([2, 0]), good) for good in subsets])
    assert RockSampleVectorEnv.optimal_return(4, 3, discount=discount) == pytest.approx(expected)
    if discount == 1:
        assert expected == 10 + 10 * 3 / 2


def begun(good, cell=(3, 0), **kwargs):
    env = RockSampleVectorEnv(1, 7, len(good), autoreset_mode="Disabled", **kwargs)
    env.reset(seed=0)
    state = env.get_state()
    state["good"][:, 0], state["cell"][0] = good, cell[0] * 7 + cell[1]
    env.set_state(state)
    return env


def test_worked_by_hand():
    (row, column), other = RockSample(7, 2).places.tolist()
    env = begun([True, False], (row, column))
    actions = [CHECK, SAMPLE, CHECK, SAMPLE, WEST if column else EAST, SAMPLE]
    came = [env.step([action]) for action in actions]
    assert [step[0][0, 14:].tolist() for step in came] == [[1, 0], [0, 0], [-1, 0], [0, 0], [0, 0], [0, 0]]
    last = 0 if [row, came[-1][0][0, 7:14].argmax()] != other else -10 * 0.95**5
    np.testing.assert_allclose([step[1][0] for step in came], [0, 9.5, 0, -10 * 0.95**3, 0, last])
    assert not any(step[2][0] for step in came)


def test_moves_stay_on_the_grid_and_the_exit_is_to_the_east():
    env = begun([True], (0, 0), discount=1.0)
    came = [env.step([action]) for action in (NORTH, WEST, SOUTH, *[EAST] * 7)]
    cells = [(int(step[0][0, :7].argmax()), int(step[0][0, 7:14].argmax())) for step in came]
    assert cells == [(0, 0), (0, 0), (1, 0), *[(1, column) for column in (1, 2, 3, 4, 5, 6, 6)]]
    assert [step[1][0] for step in came] == [0.0] * 9 + [10.0]
    assert [bool(step[2][0]) for step in came] == [False] * 9 + [True]


@pytest.mark.parametrize("half_distance", [1.0, 20.0])
def test_readings_are_right_as_often_as_the_distance_says(half_distance):
    env = RockSampleVectorEnv(20_000, half_distance=half_distance)
    env.reset(seed=0)
    for rock, place in enumerate(env.dynamics.places):
        distance = np.linalg.norm(place - [3, 0])
        reading = env.step(np.full(20_000, CHECK + rock))[0][:, 14 + rock]
        right = (reading > 0) == env.state["good"][rock]
        assert set(reading) == {-1.0, 1.0}
        assert right.mean() == pytest.approx(0.5 + 0.5 * 2 ** (-distance / half_distance), abs=0.02)


def test_half_of_the_rocks_are_good_and_a_layout_is_always_the_same():
    env = RockSampleVectorEnv(4000)
    env.reset(seed=0)
    assert env.state["good"].mean() == pytest.approx(0.5, abs=0.01)
    assert RockSample().places.tolist() == [[1, 3], [2, 2], [0, 1], [4, 5], [3, 3], [5, 6], [5, 1], [6, 0]]
    assert RockSample(layout=1).places.tolist() != RockSample().places.tolist()
    assert len({tuple(place) for place in RockSample(2, 4).places.tolist()}) == 4


def test_truncated_at_the_step_limit():
    env = RockSampleVectorEnv(1, max_episode_steps=3, autoreset_mode="Disabled")
    env.reset(seed=0)
    assert [bool(env.step([SAMPLE])[3][0]) for _ in range(3)] == [False, False, True]


def test_returns_that_are_not_known():
    with pytest.raises(UnsupportedError, match="computed for up to 12 rocks; got 13"):
        RockSampleVectorEnv.optimal_return(rocks=13)
    with pytest.raises(UnsupportedError, match="measured with its default arguments only"):
        RockSampleVectorEnv.memoryless_return(size=5)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"size": 1}, "size must be an integer of at least 2; got 1"),
        ({"rocks": 0}, "rocks must be an integer of at least 1; got 0"),
        ({"rocks": 50}, "rocks must be at most one for each of the 49 cells; got 50"),
        ({"layout": -1}, "layout must be an integer of at least 0; got -1"),
        ({"half_distance": 0}, "half_distance must be a number above 0; got 0"),
        ({"half_distance": float("nan")}, "half_distance must be a number above 0; got nan"),
        ({"discount": 1.1}, "discount must be above 0 and at most 1; got 1.1"),
        ({"discount": True}, "discount must be above 0 and at most 1; got True"),
        ({"max_episode_steps": 0}, "max_episode_steps must be an integer of at least 1; got 0"),
    ],
)
def test_arguments_are_checked(kwargs, words):
    for cls in (RockSampleEnv, RockSampleVectorEnv):
        with pytest.raises(ArgumentError, match=words):
            cls(**kwargs)
