"""Battleship: sink ships on a hidden board."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recurl.core.errors import ArgumentError
from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.envs.tasks.popgym.cards import one_hot, one_hot_space


class Battleship(Dynamics):
    """Fire at the squares of a board until all ships are sunk.

    POPGym's Battleship. Observation: whether the last shot hit, one-hot `[2]`, without its position. Action: row and
    column. Reward: `1 / ship squares` for a hit, `-1 / water squares` for a miss; a square already fired at counts as a
    miss. Terminated when all ships are sunk. The step limit is the number of squares.

    Ships are placed one after another, each uniformly among the free placements, equivalent to the package, which
    retries until a placement is free. As in the package, the worst return of an episode is below -1: all shots may
    miss.

    State: `ships` and `shot_at`, bool `[squares, rows]`, row by row; `hit`, bool `[rows]`.

    Args:
        board_size: squares per side; at least 2.
        ship_sizes: squares of each ship, at least 2 each.

    Raises:
        ArgumentError: an argument is out of range, or there may be no room for a ship.
    """

    def __init__(self, board_size: int = 10, ship_sizes: Sequence[int] = (2, 3, 3, 4)) -> None:
        self.board_size = check_count("board_size", board_size, minimum=2)
        self.ship_sizes = tuple(check_count("ship_sizes", size, minimum=2) for size in ship_sizes)
        self.num_squares, self.num_targets = board_size**2, sum(self.ship_sizes)
        self._placements = [_placements(board_size, size) for size in self.ship_sizes]
        self._check_room()
        super().__init__(
            observation_space=one_hot_space(2), actions=(board_size, board_size), step_limit=self.num_squares
        )

    def _check_room(self) -> None:
        """Reject ships without guaranteed room: an occupied square blocks at most ``2 * size`` placements of a ship."""
        taken = 0
        for size, places in zip(self.ship_sizes, self._placements, strict=True):
            if 2 * size * taken >= len(places):
                raise ArgumentError(
                    f"ship_sizes must leave room for every ship, wherever earlier ones lie; got {self.ship_sizes}"
                    f" on a board of {self.board_size} x {self.board_size}: use a larger board or fewer ships"
                )
            taken += size

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Place the ships."""
        ships = None
        for places in self._placements:
            # The largest random score among the free placements selects one of them uniformly.
            scores = draw.uniform(0.0, 1.0, (len(places),))
            table = xp.asarray(places)
            if ships is None:
                chosen = xp.argmax(scores, axis=0)
                ships = xp.take(table, chosen).T
            else:
                chosen = xp.argmax(xp.where(xp.matmul(table, ships) > 0, -1.0, scores), axis=0)
                ships = ships + xp.take(table, chosen).T
        ships = xp.astype(ships, xp.bool)
        none = xp.zeros(tuple(ships.shape), dtype=xp.bool)
        return {"ships": ships, "shot_at": none, "hit": xp.zeros((ships.shape[1],), dtype=xp.bool)}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Fire at a square."""
        square = actions[:, 0] * self.board_size + actions[:, 1]
        ships, before = state["ships"], state["shot_at"]
        hit = xp.pick(ships, square) & ~xp.pick(before, square)
        shot_at = before | (xp.arange(self.num_squares)[:, None] == square)
        reward = xp.where(hit, 1 / self.num_targets, -1 / (self.num_squares - self.num_targets))
        return {"ships": ships, "shot_at": shot_at, "hit": hit}, reward, xp.all(shot_at | ~ships, axis=0)

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return whether the last shot hit."""
        return one_hot(xp, (state["hit"],), (2,))


def _placements(board_size: int, size: int) -> NDArray[np.float32]:
    """Return all placements of a ship as masks of its squares: `[placements, squares]`."""
    starts = range(board_size - size + 1)
    boards = np.zeros((2, board_size, len(starts), board_size, board_size), np.float32)
    for line in range(board_size):
        for start in starts:
            boards[0, line, start, line, start : start + size] = 1
            boards[1, line, start, start : start + size, line] = 1
    return boards.reshape(-1, board_size**2)
