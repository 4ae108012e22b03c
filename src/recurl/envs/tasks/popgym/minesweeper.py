"""MineSweeper: find all squares without a mine on a hidden board."""

from __future__ import annotations

from typing import Any

import numpy as np

from recurl.core.errors import ArgumentError
from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.envs.tasks.popgym.cards import one_hot, one_hot_space


class MineSweeper(Dynamics):
    """Open the squares of a board, except those with a mine.

    POPGym's MineSweeper. Observation: number of mines on the last opened square and the eight around it, one-hot
    `[min(mines, 9) + 1]`, 0 at the beginning, without the position of the square. Action: row and column. Reward:
    `1 / n` for one of the n squares without a mine, `-0.5 / (n - 2)` for a square that is already open, `-0.5 - 1 / n`
    for a mine. Terminated by a mine, or when all other squares are open. The step limit is n.

    An episode that terminates with its last step is also truncated, as in all of recurl's tasks, unlike in the package.

    State: `mines` and `opened`, bool `[squares, rows]`, row by row; `around`, int8 `[squares, rows]`, mines on a square
    and around it; `seen`, int8 `[rows]`.

    Args:
        board_size: squares per side; at least 2.
        num_mines: number of mines; at least 1, and at least three fewer than squares.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, board_size: int = 4, num_mines: int = 2) -> None:
        self.board_size = check_count("board_size", board_size, minimum=2)
        self.num_mines = check_count("num_mines", num_mines, minimum=1)
        self.num_squares = board_size**2
        free = self.num_squares - num_mines
        if free < 3:
            raise ArgumentError(f"num_mines must leave 3 of the {self.num_squares} squares free; got {num_mines}")
        self._values = min(num_mines, 9) + 1
        super().__init__(
            observation_space=one_hot_space(self._values), actions=(board_size, board_size), step_limit=free
        )
        self._good, self._again = 1 / free, -0.5 / (free - 2)
        self._mine = -0.5 - self._good
        near = np.abs(np.subtract.outer(np.arange(board_size), np.arange(board_size))) <= 1
        self._near = np.kron(near, near).astype(np.float32)  # neighborhood of every square, including itself

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Place the mines at the squares with the smallest random numbers."""
        scores = draw.uniform(0.0, 1.0, (self.num_squares,))
        order = xp.argsort(scores, axis=0)
        mines = scores < xp.pick(scores, order[self.num_mines])
        around = xp.matmul(xp.asarray(self._near), xp.astype(mines, xp.float32))
        none = xp.zeros(tuple(mines.shape), dtype=xp.bool)
        seen = xp.zeros((mines.shape[1],), dtype=xp.int8)
        return {"mines": mines, "opened": none, "around": xp.astype(around, xp.int8), "seen": seen}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Open a square."""
        square = actions[:, 0] * self.board_size + actions[:, 1]
        mines, before = state["mines"], state["opened"]
        hit = xp.pick(mines, square)
        reward = xp.where(hit, self._mine, xp.where(xp.pick(before, square), self._again, self._good))
        opened = before | (xp.arange(self.num_squares)[:, None] == square)
        after = {**state, "opened": opened, "seen": xp.pick(state["around"], square)}
        return after, reward, hit | xp.all(opened | mines, axis=0)

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the number of mines."""
        return one_hot(xp, (state["seen"],), (self._values,))
