"""Compare recurl's POPGym tasks with those of the package ``popgym``, step by step.

Usage: python benchmarks/check_popgym.py [--episodes 100] [--tasks RepeatPreviousEasy ...]

An episode begins in recurl, and its hidden state (order of the cards, board, mines, arms, noise, maze) is set in the
package's environment. Both then play the same actions to the end; every observation, reward and end must agree. Every
second episode mostly uses a policy that sees the hidden state, so that boards are cleared, poles stay up and mazes are
left. Prints a table to stdout, and fails if anything differs. Mazes need the package mazelib.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import gymnasium
import numpy as np
import popgym.envs
from gymnasium.spaces import flatdim, flatten

from recurl.envs.tasks import TaskVectorEnv
from recurl.envs.tasks.popgym import POPGYM_TASKS
from recurl.envs.tasks.popgym.labyrinth import FREE, GOAL, MOVES, START, WALL

State = dict[str, Any]
REWARD_ROUNDING = 1e-12
"""Rewards of the pendulums differ by rounding: float32 squares of arrays and scalars aren't always equal."""
_CARDS = {"colors": np.arange(52) % 2, "suits": np.arange(52) % 4, "ranks": np.arange(52) // 4}


class Agreement(NamedTuple):
    """Summary of a comparison."""

    episodes: int
    steps: int
    terminated: int
    """Number of terminated episodes."""
    reward_difference: float
    """Largest difference of rewards; observations and ends agree exactly."""


class Forced:
    """Random generator of an environment that returns given numbers.

    Args:
        uniform: result of the next ``uniform``.
        orders: results of successive shuffles.
        numbers: results of successive calls of ``random``; the first is an array.
        noise: results of ``normal`` in standard deviations, ``[calls, n]``.
        chosen: result of ``choice``.
    """

    def __init__(
        self, *, uniform: Any = None, orders: Any = (), numbers: Any = (), noise: Any = (), chosen: Any = None
    ) -> None:
        self._uniform, self._chosen = uniform, chosen
        self._orders, self._numbers, self._noise = iter(orders), iter(numbers), iter(noise)
        self.integers = np.random.default_rng(0).integers  # for a board that is replaced

    def shuffle(self, array: Any) -> None:
        array[:] = next(self._orders)

    def uniform(self, low: Any, high: Any, size: Any = None) -> Any:
        return self._uniform

    def random(self, size: Any = None, dtype: Any = None) -> Any:
        return next(self._numbers)

    def normal(self, mean: float, sigma: Any) -> Any:
        return mean + sigma * next(self._noise)

    def choice(self, values: Any, size: int, replace: bool) -> Any:
        return self._chosen


class Carved:
    """Maze of the package ``mazelib`` whose generator and entrances are those of a state."""

    def __init__(self, state: State) -> None:
        size = round(len(state["squares"]) ** 0.5)
        self._squares = state["squares"].reshape(size, size)
        self.grid, self.generator = (self._squares != FREE).astype(np.int8), None
        self.start, self.end = (_place(self._squares == what) for what in (START, GOAL))

    def generate(self) -> None:
        """Do nothing, as the maze has been carved."""

    def generate_entrances(self, start_outer: bool) -> None:
        """Do nothing, as there are entrances."""


def compare(name: str, episodes: int, seed: int = 0) -> Agreement:
    """Play episodes of a task in both implementations.

    Args:
        name: the task, such as ``RepeatPreviousEasy``.
        episodes: number of episodes.
        seed: seed of the hidden states and the actions.

    Raises:
        AssertionError: something differs.
    """
    ours, theirs = TaskVectorEnv(POPGYM_TASKS[name](), 1, "Disabled"), getattr(popgym.envs, name)()
    check_spaces(ours, theirs)
    rng, worst, steps, ends = np.random.default_rng(seed), 0.0, 0, 0
    for episode in range(episodes):
        observation = ours.reset(seed=seed + episode)[0][0]
        _same(name, 0, observation, force(theirs, hidden(ours)), theirs)
        player, done, step = _player(theirs, skilled=episode % 2 == 1, rng=rng), False, 0
        while not done:
            action = player(hidden(ours))
            observations, rewards, terminated, truncated, _ = ours.step(np.asarray(action)[None])
            expected, reward, end, cut, _ = theirs.step(action)
            step += 1
            _same(name, step, observations[0], expected, theirs)
            difference = abs(float(rewards[0]) - reward)
            assert difference <= REWARD_ROUNDING, f"{name}, step {step}: rewards {rewards[0]} and {reward}"
            done = bool(terminated[0] | truncated[0])
            assert bool(terminated[0]) == end, f"{name}, step {step}: terminated {terminated[0]} and {end}"
            assert done == (end or cut), f"{name}, step {step}: ended {done} and {end or cut}"
            worst, steps = max(worst, difference), steps + 1
        ends += int(end)
    return Agreement(episodes, steps, ends, worst)


def check_spaces(ours: TaskVectorEnv, theirs: gymnasium.Env) -> None:
    """Compare the spaces: actions are the same, observations are the package's flattened to one vector."""
    assert ours.single_action_space == theirs.action_space
    assert ours.single_observation_space.shape == (flatdim(theirs.observation_space),)


def hidden(ours: TaskVectorEnv) -> State:
    """Return the state of the only row."""
    return {name: array[..., 0] for name, array in ours.state.items()}


def force(theirs: Any, state: State) -> Any:
    """Begin an episode of the package with recurl's hidden state, and return its first observation."""
    theirs.np_random = Forced(**_draws(theirs, state))
    carved = mock.patch("popgym.core.maze.Maze", return_value=Carved(state)) if "squares" in state else nullcontext()
    with carved:
        observation, _ = theirs.reset()
    if "ships" in state:
        theirs.board[...] = state["ships"].reshape(theirs.board.shape)
    return observation


def _draws(theirs: Any, state: State) -> dict[str, Any]:
    """Return the random numbers of an episode, as arguments of :class:`Forced`."""
    if "physical" in state:
        noise = [state[name] for name in sorted(state) if name.startswith("noise_")]
        return {"uniform": state["physical"], "noise": np.stack(noise, axis=-1) if noise else ()}
    if "arms" in state:
        return {"numbers": [state["arms"], *state["luck"]]}
    if "squares" in state:
        return {}
    if "mines" in state:
        return {"chosen": np.flatnonzero(state["mines"])}
    return {
        "orders": [_order(theirs, state, name) for name in ("suits", "ranks", "values", "queries") if name in state]
    }


def _order(theirs: Any, state: State, name: str) -> Any:
    """Return the deck's cards in an order that deals these faces, as the package deals from the end."""
    faces = state[name]
    kind = name if name in _CARDS else next(kind for kind in _CARDS if theirs.deck_idx_type.max() == _CARDS[kind].max())
    cards = np.tile(_CARDS[kind], len(faces) // 52)
    order = np.empty(len(faces), np.int64)
    order[np.argsort(faces, kind="stable")] = np.argsort(cards, kind="stable")
    return order if "up" in state else order[::-1]


def _same(name: str, step: int, ours: Any, theirs: Any, env: gymnasium.Env) -> None:
    expected = flatten(env.observation_space, theirs).astype(np.float32)
    assert np.array_equal(ours, expected), f"{name}, step {step}: observations {ours} and {expected}"


def _player(theirs: Any, *, skilled: bool, rng: np.random.Generator) -> Callable[[State], Any]:
    """Return a policy: random, or mostly based on the hidden state."""

    def act(state: State) -> Any:
        if skilled and rng.random() < 0.9:
            action = _skilled(theirs, state)
            if action is not None:
                return action
        space = theirs.action_space
        if isinstance(space, gymnasium.spaces.Box):
            return rng.uniform(1.2 * space.low, 1.2 * space.high).astype(np.float32)
        return rng.integers(space.nvec if isinstance(space, gymnasium.spaces.MultiDiscrete) else space.n)

    return act


def _skilled(theirs: Any, state: State) -> Any:
    """Return a good action if random ones would end an episode early, or never; else None."""
    if "physical" in state and len(state["physical"]) == 4:
        return int(state["physical"] @ (0.1, 0.3, 1.0, 0.3) > 0)
    if "squares" in state:
        return _way(state)
    if "ships" in state:
        return _first(theirs, state["ships"] & ~state["shot_at"])
    if "mines" in state:
        return _first(theirs, ~state["mines"] & ~state["opened"])
    if "up" in state:
        down, first = ~state["up"], int(state["first"])
        if first >= 0:
            down &= state["values"] == state["values"][first]
            down[first] = False
        return int(np.flatnonzero(down)[0])
    return None


def _first(theirs: Any, squares: Any) -> Any:
    size = int(theirs.action_space.nvec[0])
    return np.array(np.divmod(np.flatnonzero(squares)[0], size))


def _place(squares: Any) -> tuple[int, ...] | None:
    """Return the row and column of the only square that is set, or None."""
    return tuple(np.argwhere(squares)[0].tolist()) if squares.any() else None


def _way(state: State) -> int:
    """Return the first move on a shortest way to the goal, or to a square that has not been visited."""
    size = round(len(state["squares"]) ** 0.5)
    squares = state["squares"].reshape(size, size)
    wanted = ~state["visited"].reshape(size, size) if "visited" in state else squares == GOAL
    waiting = [(*divmod(int(state["place"]), size), -1)]
    seen = {waiting[0][:2]}
    for row, column, first in waiting:
        for move, (down, right) in enumerate(MOVES):
            to = row + down, column + right
            if to not in seen and min(to) >= 0 and max(to) < size and squares[to] != WALL:
                seen.add(to)
                waiting.append((*to, move if first < 0 else first))
                if wanted[to]:
                    return waiting[-1][2]
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--tasks", nargs="+", choices=list(POPGYM_TASKS), default=list(POPGYM_TASKS), metavar="TASK")
    arguments = parser.parse_args()
    print(f"{'task':32} {'episodes':>8} {'steps':>8} {'terminated':>10} {'reward':>8} {'seconds':>8}")
    total = 0
    for name in arguments.tasks:
        begin = time.perf_counter()
        found = compare(name, arguments.episodes)
        total += found.steps
        print(
            f"{name:32} {found.episodes:8} {found.steps:8} {found.terminated:10} {found.reward_difference:8.1g} "
            f"{time.perf_counter() - begin:8.1f}",
            flush=True,
        )
    print(f"{len(arguments.tasks)} tasks, {total} steps: all observations, rewards and ends agree")


if __name__ == "__main__":
    main()
