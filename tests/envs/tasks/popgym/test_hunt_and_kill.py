from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
import torch
from tests.programs import Programs
from tests.recurrence.kernel_tests import run

from recurl.core.errors import UnsupportedError
from recurl.envs.tasks.namespaces import HOST, RowDraw, TensorDraw, tensors_on
from recurl.envs.tasks.popgym import hunt_and_kill
from recurl.envs.tasks.popgym.hunt_and_kill import carve, draw_maze
from recurl.native.library import missing

PACKAGE = "tests.envs.tasks.popgym"


def draws(side, rows, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(side**2, size=rows), rng.random((3 * (side**2 - 1), rows))


def reached(squares, side):
    """Return which squares can be reached from the first free one, `[width, width, rows]`."""
    width = 2 * side + 1
    free = squares.reshape(width, width, -1) == 0
    found = np.zeros_like(free)
    rows = np.arange(free.shape[2])
    found.reshape(width**2, -1)[(squares == 0).argmax(axis=0), rows] = True
    while True:
        more = found.copy()
        more[1:] |= found[:-1]
        more[:-1] |= found[1:]
        more[:, 1:] |= found[:, :-1]
        more[:, :-1] |= found[:, 1:]
        more &= free
        if (more == found).all():
            return found
        found = more


@pytest.mark.parametrize("side", [5, 7, 9])
def test_mazes_are_perfect_on_host_and_device(side):
    rows = 300
    host = draw_maze(HOST, RowDraw([np.random.default_rng(row) for row in range(rows)]), side)
    device = draw_maze(tensors_on("cpu"), TensorDraw(torch.Generator().manual_seed(0), rows), side).numpy()
    for squares in (host, device):
        assert (squares.dtype, squares.shape) == (np.int8, ((2 * side + 1) ** 2, rows))
        grid = squares.reshape(2 * side + 1, 2 * side + 1, rows)
        assert (grid[1::2, 1::2] == 0).all()
        assert (grid[::2, ::2] == 1).all()
        assert ((squares == 0).sum(0) == 2 * side**2 - 1).all()  # as many passages as a tree has edges
        assert (reached(squares, side) == (grid == 0)).all()
        assert len({squares[:, row].tobytes() for row in range(rows)}) > 290


@pytest.mark.parametrize("side", [3, 5, 9, 12])
@pytest.mark.parametrize("layout", ["rows first", "rows last"])
def test_the_library_carves_what_the_definition_says(side, layout):
    if missing() is not None:
        pytest.skip("there was no compiler when recurl was installed")
    starts, chances = draws(side, 200)
    chances[1::3, :20] = 1 - 1e-13  # the luck of hunts that run out of trials
    expected = carve(starts, chances, side)
    assert ((expected == 0).sum(0) < 2 * side**2 - 1)[:20].any()
    chances = np.asfortranarray(chances) if layout == "rows first" else chances
    np.testing.assert_array_equal(hunt_and_kill._carve_on_host(starts, chances, side), expected)
    tensors = torch.from_numpy(starts), torch.from_numpy(chances)
    np.testing.assert_array_equal(hunt_and_kill._carve_on_device(*tensors, side).numpy(), expected)


def test_mazes_are_the_same_without_the_library(monkeypatch):
    generators = [[np.random.default_rng(row) for row in range(5)] for _ in range(2)]
    expected = draw_maze(HOST, RowDraw(generators[0]), 4)
    monkeypatch.setattr(hunt_and_kill, "missing", lambda: "it was not built")
    np.testing.assert_array_equal(draw_maze(HOST, RowDraw(generators[1]), 4), expected)


class Choices:
    """Random choices of `mazelib` as the definition makes them, and hunts with as many trials as it counts."""

    def __init__(self, side, start, chances):
        self.side, self.chances = side, chances.reshape(-1, 3)
        self.step, self.numbers = 0, [*self.square(start)]
        self.generator = None

    def square(self, cell):
        return 2 * (cell // self.side) + 1, 2 * (cell % self.side) + 1

    def choice(self, choices):
        chance = self.chances[self.step, 2]
        self.step += 1
        return sorted(choices)[int(chance * len(choices))]

    def randrange(self, first, last, step):
        if not self.numbers:
            self.numbers = self.hunt()
        return self.numbers.pop(0)

    def hunt(self):
        """Return the coordinates of the next trials, up to the one that succeeds."""
        cells = range(self.side**2)
        open_ = [cell for cell in cells if self.grid[self.square(cell)] == 0]
        ends = [cell for cell in open_ if self.generator._find_neighbors(*self.square(cell), self.grid, True)]
        if not ends:
            return [1, 1]
        found, luck, _ = self.chances[self.step]
        failures = int(math.log(1 - luck) / math.log(1 - len(ends) / len(cells)))
        fails = next(cell for cell in cells if cell not in ends)
        return [*self.square(fails)] * failures + [*self.square(ends[int(found * len(ends))])]


@pytest.mark.parametrize("side", [3, 5, 9])
def test_the_package_carves_the_same_maze_from_the_same_choices(side):
    """Its own code runs, with choices replaced: hunts that are drawn at once here are trial after trial there."""
    package = pytest.importorskip("mazelib.generate.HuntAndKill")
    starts, chances = draws(side, 40)
    chances[1::3, :10] = 1 - 1e-13
    expected = carve(starts, chances, side)
    for row, start in enumerate(starts.tolist()):
        made = Choices(side, start, chances[:, row])
        made.generator = package.HuntAndKill(side, side)
        walk = made.generator._walk

        def remembered(grid, *place, made=made, walk=walk):
            made.grid = grid
            return walk(grid, *place)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(made.generator, "_walk", remembered))
            stack.enter_context(mock.patch.object(package, "choice", made.choice))
            stack.enter_context(mock.patch.object(package, "randrange", made.randrange))
            grid = made.generator.generate()
        np.testing.assert_array_equal(grid.ravel(), expected[:, row])


@pytest.mark.slow
def test_passages_are_as_frequent_as_those_of_the_package():
    package = pytest.importorskip("mazelib.generate.HuntAndKill")
    side, mazes = 5, 3000
    generator = package.HuntAndKill(side, side)
    theirs = np.stack([generator.generate() for _ in range(mazes)], axis=-1).reshape(-1, mazes) == 0
    ours = carve(*draws(side, mazes), side) == 0

    def degrees(free):
        grid = free.reshape(2 * side + 1, 2 * side + 1, -1).astype(int)
        around = grid[:-2, 1:-1] + grid[2:, 1:-1] + grid[1:-1, :-2] + grid[1:-1, 2:]
        return around[::2, ::2].reshape(side**2, -1)

    for one, other in ((ours, theirs), *((degrees(ours) == n, degrees(theirs) == n) for n in (1, 2, 3))):
        share = (one.mean(1) + other.mean(1)) / 2
        varies = (share > 0.01) & (share < 0.99)
        deviation = (one.mean(1) - other.mean(1))[varies] / np.sqrt(2 * share * (1 - share) / mazes)[varies]
        assert np.abs(deviation).max() < 4.5
        assert np.square(deviation).mean() < 2


def test_compilers_see_an_operator_with_its_shape():
    starts, chances = map(torch.from_numpy, draws(4, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(
            torch.ops.recurl.hunt_and_kill, (starts, chances, 4), test_utils=("test_schema", "test_faketensor")
        )


def test_a_gpu_without_triton_is_an_error(monkeypatch):
    monkeypatch.setattr(hunt_and_kill, "missing_package", lambda: "it needs the package triton")
    with pytest.raises(UnsupportedError, match=r"carved on a GPU by Triton: pip install 'recurl\[triton\]'"):
        hunt_and_kill._carve_on_gpu(*map(torch.from_numpy, draws(3, 1)), 3)


@pytest.mark.slow
def test_the_interpreted_kernel_carves_what_the_definition_says():
    assert run("mazes_interpreted", package=PACKAGE, TRITON_INTERPRET="1") == {"3": ["0"], "9": ["0"]}


@pytest.mark.slow
def test_the_compiled_kernel_needs_registers_only(programs: Programs):
    found = run("mazes_offline", "90", start=programs.run, package=PACKAGE, TRITON_INTERPRET="0")
    assert found == {"9": ["0", "0"]}
