# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN202
# Kernel bodies are Triton code: only its compiler knows their types.
"""Mazes of the algorithm Hunt-and-Kill on a GPU, a warp for each. Imported only if Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurl.recurrence.cuda.launch import on
from recurl.recurrence.cuda.prepared import prepared

__all__ = ["carve"]


def carve(starts: Tensor, chances: Tensor, side: int) -> Tensor:
    """Return the squares of mazes, as :func:`recurl.envs.tasks.popgym.hunt_and_kill.carve`."""
    rows = starts.shape[0]
    squares = torch.ones((2 * side + 1) ** 2, rows, dtype=torch.int8, device=starts.device)
    with on(starts.device):
        prepared(carve_kernel, rows, SIDE=side, PLACES=triton.next_power_of_2(side * (side + 1)), num_warps=1)(
            starts.contiguous(), chances.contiguous(), squares, rows
        )
    return squares


@triton.jit
def carve_kernel(starts, chances, squares, rows, SIDE: tl.constexpr, PLACES: tl.constexpr):
    """Carve a maze into ``squares [(2 SIDE + 1)^2, rows]``, which are walls.

    A place is a cell, row by row, or the end of a row, which is never a closed cell, so that rows don't touch.
    """
    maze = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    row, column = place // (SIDE + 1), place % (SIDE + 1)
    is_cell = (row < SIDE) & (column < SIDE)
    start = tl.load(starts + maze).to(tl.int32)
    at = start + start // SIDE
    near = _is_near(place, at, SIDE)
    closed = is_cell & (place != at)
    beside = (row > 0).to(tl.int32) + (row < SIDE - 1) + (column > 0) + (column < SIDE - 1) - near  # closed neighbors
    trials = tl.full([], (2 * SIDE + 1) * (2 * SIDE + 1), tl.int32)
    square = _square_of(at, SIDE)
    tl.store(squares + square * rows + maze, 0)
    chance = chances + maze
    turn = tl.load(chance + 2 * rows)
    for step in range(1, SIDE * SIDE):
        following = tl.load(chance + 5 * rows, mask=step < SIDE * SIDE - 1, other=0.0)  # early, as it takes time
        choices = (near & closed).to(tl.int32)
        count = tl.sum(choices)
        if count == 0:
            ends = (is_cell & (closed == 0) & (beside > 0)).to(tl.int32)
            found = tl.sum(ends)
            failed = tl.log(1.0 - tl.load(chance + rows)) / tl.log(1.0 - found.to(tl.float64) / (SIDE * SIDE))
            trials -= 1 + failed.to(tl.int32)
            at = _pick(ends, found, tl.load(chance), place)
            square = _square_of(at, SIDE)
            near = _is_near(place, at, SIDE)
            choices = (near & closed).to(tl.int32)
            count = tl.sum(choices)
        if trials >= 0:
            at = _pick(choices, count, turn, place)
            near = _is_near(place, at, SIDE)
            closed = closed & (place != at)
            beside -= near
            before, square = square, _square_of(at, SIDE)
            tl.store(squares + square * rows + maze, 0)
            tl.store(squares + (before + square) // 2 * rows + maze, 0)
        turn = following
        chance += 3 * rows


@triton.jit
def _is_near(place, at, SIDE: tl.constexpr):
    """Return whether places are beside, above or below another."""
    distance = tl.abs(place - at)
    return (distance == 1) | (distance == SIDE + 1)


@triton.jit
def _pick(choices, count, chance, place):
    """Return one of the places that are choices, of which there are ``count``."""
    number = tl.cumsum(choices) - 1
    return tl.sum(tl.where((choices > 0) & (number == (chance * count).to(tl.int32)), place, 0))


@triton.jit
def _square_of(at, SIDE: tl.constexpr):
    return (2 * (at // (SIDE + 1)) + 1) * (2 * SIDE + 1) + 2 * (at % (SIDE + 1)) + 1
