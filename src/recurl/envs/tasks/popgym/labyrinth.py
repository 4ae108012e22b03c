"""LabyrinthEscape and LabyrinthExplore: find the way out of a maze, or visit all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recurl.core.errors import ArgumentError
from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.envs.tasks.popgym.cards import one_hot_space
from recurl.envs.tasks.popgym.hunt_and_kill import draw_maze

FREE, WALL, START, GOAL = range(4)
"""What is on a square; in observations the package reserves a fifth value, which doesn't occur."""
_VALUES = 5
MOVES = ((0, -1), (0, 1), (-1, 0), (1, 0))
"""Rows and columns of each action."""
_NO_MOVE = len(MOVES)


class Labyrinth(Dynamics):
    """Base class of the tasks in a maze, which is drawn for each episode.

    Observation: 3 by 3 squares with the agent in the middle, row by row, each one-hot `[5]`: free, wall, start, goal,
    and a value that doesn't occur; then the last action, one-hot `[5]`, the fifth at the first step. As in the
    package, an agent in the first row or column of the maze, which are outer walls, is in that of the squares too, and
    the last one is shown as walls. Action: left, right, up or down; nothing happens where there is a wall.

    The start is in an outer wall, beside one of the cells, each equally likely, the goal likewise in the opposite wall.
    Mazes have the distribution of the package's: see `recurl.envs.tasks.popgym.hunt_and_kill`.

    State: `squares`, int8 `[squares, rows]`, row by row; `place`, int64 `[rows]`, the square of the agent; `moved`,
    int8 `[rows]`, the last action.

    Args:
        maze_size: squares per side without the last outer wall, two per cell; even, at least 6.
        episode_length: one more than the step limit, as in the package; at least 2.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, maze_size: int = 10, episode_length: int = 1024) -> None:
        self.maze_size = check_count("maze_size", maze_size, minimum=6)
        if maze_size % 2:
            raise ArgumentError(f"maze_size must be even; got {maze_size}")
        self.episode_length = check_count("episode_length", episode_length, minimum=2)
        super().__init__(observation_space=one_hot_space(*[_VALUES] * 10), actions=4, step_limit=episode_length - 1)
        self._cost = -1 / episode_length
        self._squares = np.arange((maze_size + 1) ** 2, dtype=np.int32)[:, None]  # half the time of int64
        self._bits = np.eye(_VALUES, dtype=np.int8)
        self._starts, self._goals = _doors(maze_size)
        self._after, self._around = _after(maze_size), _around(maze_size)

    def enter(self, xp: Namespace, draw: Draw) -> tuple[State, Any]:
        """Return the state of rows at the start of a maze, and the square of the goal, `[rows]`, still a wall."""
        squares = draw_maze(xp, draw, self.maze_size // 2)
        doors = draw.integers(len(self._starts))
        place, goal = xp.take(xp.asarray(self._starts), doors), xp.take(xp.asarray(self._goals), doors)
        squares = xp.where(self.is_at(xp, place), START, squares)
        return {"squares": squares, "place": place, "moved": xp.full(len(place), _NO_MOVE, dtype=xp.int8)}, goal

    def is_at(self, xp: Namespace, place: Any) -> Any:
        """Return which squares are at a place, bool `[squares, rows]`."""
        return xp.asarray(self._squares) == xp.astype(place, xp.int32)

    def move(self, xp: Namespace, state: State, actions: Any) -> tuple[State, Any]:
        """Return the state after a move, and what is on the square that it aimed at, `[rows]`."""
        place = xp.take(xp.asarray(self._after), 4 * state["place"] + actions)
        there = xp.pick(state["squares"], place)
        place = xp.where(there == WALL, state["place"], place)
        return {**state, "place": place, "moved": xp.astype(actions, xp.int8)}, there

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the squares around the agent and the last action."""
        around = xp.take(xp.asarray(self._around), state["place"], axis=1)
        seen = xp.concat([xp.take_along_axis(state["squares"], around, axis=0), state["moved"][None]])
        bits = xp.take(xp.asarray(self._bits), xp.astype(seen.T, xp.int64).reshape(-1), axis=0)
        return bits.reshape(-1, 10 * _VALUES)


class LabyrinthEscape(Labyrinth):
    """Find the way from the start of a maze to its goal.

    POPGym's LabyrinthEscape. Observation: the 3 by 3 squares around the agent, each one-hot of free, wall, start, goal
    and a value that doesn't occur, and the last action, one-hot of four and none, `[50]`. Action: left, right, up or
    down. Reward: 1 at the goal, and `-1 / episode_length` at every step. Terminated at the goal, which is in the outer
    wall opposite the start.

    Mazes and peculiarities are those of the package: see :class:`~recurl.envs.tasks.popgym.labyrinth.Labyrinth`, with
    the state.

    Args:
        maze_size: squares per side without the last outer wall, two per cell; even, at least 6.
        episode_length: one more than the step limit, as in the package; at least 2.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> from recurl.envs.tasks import TaskVectorEnv
        >>> env = TaskVectorEnv(LabyrinthEscape())
        >>> observation = env.reset(seed=0)[0].reshape(10, 5)
        >>> observation[:9].argmax(1).reshape(3, 3)  # the agent is at the start, in the outer wall on the left
        array([[1, 1, 1],
               [2, 0, 1],
               [1, 0, 1]])
    """

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Draw a maze and open its goal."""
        state, goal = self.enter(xp, draw)
        return {**state, "squares": xp.where(self.is_at(xp, goal), GOAL, state["squares"])}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Move."""
        after, there = self.move(xp, state, actions)
        found = there == GOAL
        return after, xp.where(found, 1 + self._cost, self._cost), found


class LabyrinthExplore(Labyrinth):
    """Visit all free squares of a maze.

    POPGym's LabyrinthExplore. Observations and actions are those of :class:`LabyrinthEscape`; there is no goal. Reward:
    `1 / n` on each of the n free squares at the first visit, else `-1 / episode_length`. The start isn't one of them.
    Terminated when all have been visited.

    State, besides that of :class:`~recurl.envs.tasks.popgym.labyrinth.Labyrinth`: `visited`, bool `[squares, rows]`;
    `left`, int64 `[rows]`, squares that have not been visited; `worth`, float64 `[rows]`, `1 / n`.

    Args:
        maze_size: squares per side without the last outer wall, two per cell; even, at least 6.
        episode_length: one more than the step limit, as in the package; at least 2.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> from recurl.envs.tasks import TaskVectorEnv
        >>> env = TaskVectorEnv(LabyrinthExplore())
        >>> _ = env.reset(seed=0)
        >>> env.state["left"], round(1 / env.state["worth"].item())
        (array([49]), 49)
    """

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Draw a maze of which only the start has been visited."""
        state, _ = self.enter(xp, draw)
        left = xp.sum(state["squares"] == FREE, axis=0)
        worth = 1.0 / xp.astype(left, xp.float64)
        return {**state, "visited": state["squares"] == START, "left": left, "worth": worth}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Move."""
        after, _ = self.move(xp, state, actions)
        is_new = ~xp.pick(state["visited"], after["place"])
        visited = state["visited"] | self.is_at(xp, after["place"])
        left = state["left"] - xp.astype(is_new, xp.int64)
        reward = xp.where(is_new, state["worth"], self._cost)
        return {**after, "visited": visited, "left": left}, reward, left == 0


def _doors(size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all pairs of a square in an outer wall beside a cell and one in the opposite wall."""
    beside, width = np.arange(1, size, 2), size + 1
    above, left = np.meshgrid(beside, size * width + beside), np.meshgrid(beside * width, beside * width + size)
    pairs = np.array([above, above[::-1], left, left[::-1]]).swapaxes(0, 1).reshape(2, -1)
    return pairs[0].copy(), pairs[1].copy()


def _after(size: int) -> NDArray[np.int64]:
    """Return the square that each of the four moves aims at, `[squares * 4]`, within the maze."""
    row, column = (place[..., None] for place in np.indices((size + 1, size + 1)))
    down, right = np.array(MOVES).T
    return (np.clip(row + down, 0, size) * (size + 1) + np.clip(column + right, 0, size)).ravel()


def _around(size: int) -> NDArray[np.int64]:
    """Return the squares that are seen from each, `[9, squares]`; one that is not in the maze is a corner, a wall."""
    found = np.zeros((3, 3, size + 1, size + 1), np.int64)
    for row, column in np.ndindex(size + 1, size + 1):
        above, before = max(row - 1, 0), max(column - 1, 0)
        for y, x in np.ndindex(min(row + 2, size + 1) - above, min(column + 2, size + 1) - before):
            found[y, x, row, column] = (above + y) * (size + 1) + before + x
    return found.reshape(9, -1)
