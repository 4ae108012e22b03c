"""Mazes of the algorithm Hunt-and-Kill, as the package `mazelib` carves them, in a fixed number of steps."""

from __future__ import annotations

import importlib
import math
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recurl.core.errors import UnsupportedError
from recurl.envs.tasks.namespaces import HOST, Draw, Namespace
from recurl.native.library import check, hunt_and_kill_function, missing
from recurl.recurrence.cuda.backend import missing_package

__all__ = ["carve", "draw_maze"]


def draw_maze(xp: Namespace, draw: Draw, side: int) -> Any:
    """Return the squares of random mazes, int8 `[(2 side + 1)^2, rows]`, row by row: 1 for a wall, else 0.

    Cells are the squares with odd coordinates, `side` by `side` of them. A walk begins at a random cell, and from each
    cell continues to a random closed neighbor, which it opens with the wall between, until none is left. It then hunts:
    random cells are tried, `(2 side + 1)^2` in all, until one is open and has a closed neighbor, where the next walk
    begins.

    The distribution is that of `mazelib.generate.HuntAndKill`, which draws every trial. Here the cell and the number of
    trials, which has a geometric distribution, are drawn at once, so that a maze has one step for each cell but the
    first, of three random numbers. In some mazes, 18 of a million with 5 by 5 cells and 56 with 9 by 9, the trials end
    before all cells are open, and the others stay walls, as in the package.

    Args:
        xp: the namespace.
        draw: source of random numbers.
        side: number of cells per side; at least 3.

    Raises:
        UnsupportedError: the mazes are drawn on a GPU without Triton.

    Example:
        >>> from recurl.envs.tasks.namespaces import RowDraw
        >>> squares = draw_maze(HOST, RowDraw([np.random.default_rng(0)]), 3)
        >>> for row in squares.reshape(7, 7):
        ...     print("".join(".#"[square] for square in row))
        #######
        #.....#
        #####.#
        #...#.#
        #.#.#.#
        #.#...#
        #######
    """
    starts = draw.integers(side**2)
    chances = draw.uniform(0.0, 1.0, (3 * (side**2 - 1),))
    return _carve_on_host(starts, chances, side) if xp is HOST else _carve_on_device(starts, chances, side)


def carve(starts: NDArray[np.int64], chances: NDArray[np.float64], side: int) -> NDArray[np.int8]:
    """Return the squares of mazes, int8 `[(2 side + 1)^2, rows]`: the definition of all faster implementations.

    Args:
        starts: cell where each maze begins, `[rows]`.
        chances: numbers from 0 to 1, `[3 (side^2 - 1), rows]`, three for each step: which of the cells a hunt finds,
            how long it takes, and which neighbor is opened.
        side: number of cells per side.
    """
    squares = np.ones(((2 * side + 1) ** 2, len(starts)), np.int8)
    for row, (start, numbers) in enumerate(zip(starts.tolist(), chances.T.tolist(), strict=True)):
        squares[_free_squares(start, numbers, side), row] = 0
    return squares


def _free_squares(start: int, chances: list[float], side: int) -> list[int]:
    near, square = _grid(side)
    cells, at, free = range(side**2), start, [square[start]]
    closed, trials = {*cells} - {start}, (2 * side + 1) ** 2
    for found, luck, turn in zip(chances[::3], chances[1::3], chances[2::3], strict=True):
        choices = [cell for cell in near[at] if cell in closed]
        if not choices:
            ends = [cell for cell in cells if cell not in closed and not closed.isdisjoint(near[cell])]
            trials -= 1 + int(math.log(1 - luck) / math.log(1 - len(ends) / len(cells)))
            if trials < 0:
                break
            at = ends[int(found * len(ends))]
            choices = [cell for cell in near[at] if cell in closed]
        to = choices[int(turn * len(choices))]
        closed.remove(to)
        free += [square[to], (square[at] + square[to]) // 2]
        at = to
    return free


@cache
def _grid(side: int) -> tuple[list[list[int]], list[int]]:
    """Return the neighbors of each cell, in ascending order, and the square of each."""
    places = [divmod(cell, side) for cell in range(side**2)]
    near = [
        [cell for cell, (y, x) in enumerate(places) if abs(y - row) + abs(x - column) == 1] for row, column in places
    ]
    return near, [(2 * row + 1) * (2 * side + 1) + 2 * column + 1 for row, column in places]


def _carve_on_host(starts: NDArray[np.int64], chances: NDArray[np.float64], side: int) -> NDArray[np.int8]:
    if missing() is not None:
        return carve(starts, chances, side)
    rows = len(starts)
    squares = np.empty(((2 * side + 1) ** 2, rows), np.int8)
    between, apart = (stride // chances.itemsize for stride in chances.strides)
    pointers = starts.ctypes.data, chances.ctypes.data
    check(hunt_and_kill_function()(side, rows, *pointers, between, apart, squares.ctypes.data))
    return squares


@torch.library.custom_op(
    "recurl::hunt_and_kill",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor starts, Tensor chances, int side) -> Tensor",
)
def _carve_on_device(starts: Tensor, chances: Tensor, side: int) -> Tensor:
    """Carve mazes on the device, as an operation that compilers don't look into."""
    return torch.from_numpy(_carve_on_host(starts.contiguous().numpy(), chances.numpy(), side))


@_carve_on_device.register_fake
def _(starts: Tensor, chances: Tensor, side: int) -> Tensor:
    return starts.new_empty(((2 * side + 1) ** 2, len(starts)), dtype=torch.int8)


@_carve_on_device.register_kernel("cuda")
def _carve_on_gpu(starts: Tensor, chances: Tensor, side: int) -> Tensor:
    reason = missing_package()
    if reason is not None:
        raise UnsupportedError(f"Mazes are carved on a GPU by Triton: pip install 'recurl[triton]' ({reason}).")
    # By name: a static import would make users without a GPU load Triton.
    return importlib.import_module(f"{__package__}.hunt_and_kill_gpu").carve(starts, chances, side)
