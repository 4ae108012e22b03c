"""ColorCubes: collect cubes on a grid that are seen only when one of them has moved."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
from recurl.envs.tasks.drawing import BLACK, BLUE, BROWN, GREEN, GREY, LIGHT, RED, Canvas, Frame
from recurl.envs.tasks.dynamics import Dynamics, State, check_count, check_flag, is_number
from recurl.envs.tasks.namespaces import Draw, Namespace

COLLECT = 4
"""The action after up, down, left and right."""

_MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1], [0, 0]])  # rows and columns, by action
_MISS = -0.1  # reward of collecting where the target isn't, divided by the number of targets
_COLORS = (RED, GREEN, BLUE, BROWN, GREY)
_MEMORYLESS_RETURN = 0.4  # measured with default arguments


def _step_limit(size: int, targets: int, max_episode_steps: int | None) -> int:
    return 2 * _needed(size, targets) if max_episode_steps is None else max_episode_steps


def _needed(size: int, targets: int) -> int:
    """Return the most steps that a player who knows all cubes can need."""
    return targets * (2 * size - 1)


class ColorCubes(Dynamics):
    """Dynamics of `recurl/ColorCubes-v0`: see `ColorCubesVectorEnv`.

    State, int64 unless said: `cells`, of the cubes, `[cubes, rows]`; `agent`, its cell, and `found`, the number of
    targets collected, `[rows]`; `moved`, whether a cube moved in the last step, bool `[rows]`; `colors`, of the
    targets, `[targets + 1, rows]`; `luck`, float64, and `jumps`, the random numbers of each step, `[step_limit + 1,
    rows]`.

    Args:
        size: number of rows and columns of the grid; at least 2.
        cubes: number of cubes, each of its own color; at least 1, and fewer than half of the cells.
        targets: number of cubes to collect; at least 1.
        teleport: probability in each step that a cube other than the target teleports, from 0 to 1.
        hide_colors: after the first step, show where cubes are but not their colors.
        max_episode_steps: number of steps after which an episode is truncated; at least 1; None for the default.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        size: int = 5,
        cubes: int = 3,
        targets: int = 5,
        teleport: float = 0.1,
        hide_colors: bool = False,
        max_episode_steps: int | None = None,
    ) -> None:
        self.size = check_count("size", size, minimum=2)
        self.cubes = check_count("cubes", cubes, minimum=1)
        self.targets = check_count("targets", targets, minimum=1)
        if 2 * cubes >= size**2:
            raise ArgumentError(f"cubes must be fewer than half of the {size**2} cells; got {cubes}")
        if not is_number(teleport) or not 0 <= teleport <= 1:
            raise ArgumentError(f"teleport must be a probability from 0 to 1; got {teleport!r}")
        self.teleport = float(teleport) if cubes > 1 else 0.0
        self.hide_colors = check_flag("hide_colors", hide_colors)
        limit = check_count("max_episode_steps", _step_limit(size, targets, max_episode_steps), minimum=1)
        count = 2 * size + cubes + cubes * size**2 + (size**2 if self.hide_colors else 0)
        super().__init__(observation_space=Box(0.0, 1.0, (count,), np.float32), actions=5, step_limit=limit)
        self._free = size**2 - cubes  # cells without a cube
        self._grid, self._line, self._names = (np.arange(count)[:, None] for count in (size**2, size, cubes))

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Place cubes and agent on different cells; draw the targets, and the random numbers of each step."""
        order = xp.argsort(draw.uniform(0.0, 1.0, (self.size**2,)), axis=0)
        agent, steps = order[self.cubes], (self.step_limit + 1,)
        return {
            "cells": xp.astype(order[: self.cubes], xp.int64),
            "agent": xp.astype(agent, xp.int64),
            "found": xp.zeros_like(agent),
            "moved": xp.zeros(len(agent), dtype=xp.bool),
            "colors": draw.integers(self.cubes, (self.targets + 1,)),
            "luck": draw.uniform(0.0, 1.0, steps),
            "jumps": draw.integers(self._free * max(1, self.cubes - 1), steps),
        }

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Move or collect; then at most one cube jumps to a free cell: the collected one, or one that teleports."""
        cells, agent, target = state["cells"], state["agent"], self._target(xp, state)
        collects = actions == COLLECT
        hits = collects & (agent == xp.pick(cells, target))
        jump = xp.pick(state["jumps"], steps)
        other = jump // self._free
        jumper = xp.where(hits, target, other + (other >= target))
        moved = hits | (xp.pick(state["luck"], steps) < self.teleport)
        place = number = jump % self._free
        for _ in range(self.cubes):  # until it is the free cell of this number
            place = number + xp.sum(cells <= place, axis=0)
        step = xp.take(xp.asarray(_MOVES), actions)
        row = xp.clip(agent // self.size + step[:, 0], 0, self.size - 1)
        column = xp.clip(agent % self.size + step[:, 1], 0, self.size - 1)
        after = {
            "cells": xp.where((xp.asarray(self._names) == jumper) & moved, place, cells),
            "agent": row * self.size + column,
            "found": state["found"] + hits,
            "moved": moved,
        }
        reward = hits + _MISS * xp.astype(collects & ~hits, xp.float64)
        return {**state, **after}, reward / self.targets, after["found"] >= self.targets

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the agent's row and column, the target, and after a move the cells of the cubes, as bits."""
        agent, line, grid = state["agent"], xp.asarray(self._line), xp.asarray(self._grid)
        at = state["cells"][:, None] == grid
        first = steps == 0
        shown = at & (first if self.hide_colors else first | state["moved"])
        bits = [
            line == agent // self.size,
            line == agent % self.size,
            xp.asarray(self._names) == self._target(xp, state),
            xp.reshape(shown, (self.cubes * self.size**2, len(agent))),
        ]
        if self.hide_colors:
            bits.append(xp.any(at, axis=0) & state["moved"])
        return xp.astype(xp.concat(bits).T, xp.float32)

    def _target(self, xp: Namespace, state: State) -> Any:
        return xp.pick(state["colors"], xp.minimum(state["found"], self.targets))


class ColorCubesVectorEnv(TaskVectorEnv):
    """Collect cubes that are seen only when one of them has moved (`recurl/ColorCubes-v0`, vectorized).

    After the Color-Cubes of Shchendrigin et al. (2026), "Memory Retention Is Not Enough to Master Memory Tasks in
    Reinforcement Learning" (arXiv 2601.15086): a grid with cubes of different colors, one of which is the target. The
    agent sees the cubes when an episode begins, and whenever one has jumped: the target that it collected, or another
    one that teleported. What it remembers of that cube is then outdated, and the rest still holds.
    `cubes=1, targets=1` is the level Trivial of the paper, `hide_colors=True` its Extreme: which cube has jumped then
    follows only from a map in memory.

    Differences, and rules that the paper's abstract and project page leave open and that are chosen here: a cube gives
    `1 / targets` instead of 1; collecting elsewhere than at the target costs `0.1 / targets` and changes nothing;
    moves cost nothing; at most one cube jumps in a step, to a cell that was free, and the present target stays;
    targets are drawn independently; the target's color is always shown; a cube under the agent isn't.

    Observation: float32 `[2 size + cubes + cubes size^2]` of zeros and ones: the agent's row and column, one-hot; the
    color of the target, one-hot; and for each cube the grid, row by row, with a 1 at its cell, or 0 everywhere if no
    cube has just jumped. With `hide_colors`, these grids are shown at the first step only, and followed by another
    `size^2` with a 1 at every cube after a jump.
    Actions: `Discrete(5)`: 0 up, 1 down, 2 left, 3 right, 4 collect. A move off the grid does nothing.
    Reward: `1 / targets` for collecting the target, `-0.1 / targets` for collecting elsewhere, else 0.
    Episode: terminated when all targets are collected; truncated after `max_episode_steps`, by default twice
    `targets (2 size - 1)`, which always suffice.

    Optimal return: 1. The target is where a jump last left it, and doesn't move until it is collected, so that an agent
    that remembers all cubes needs at most `2 (size - 1)` moves for each.

    Best memoryless return: about 0.4 with default arguments, measured, as no closed form is known: a policy that makes
    a step towards the target whenever it is shown, keeps to a pair of neighbouring cells otherwise, and collects what
    it sees itself stand on.

    Args:
        num_envs: number of rows.
        size: number of rows and columns of the grid; at least 2.
        cubes: number of cubes, each of its own color; at least 1, and fewer than half of the cells.
        targets: number of cubes to collect; at least 1.
        teleport: probability in each step that a cube other than the target teleports, from 0 to 1.
        hide_colors: after the first step, show where cubes are but not their colors.
        max_episode_steps: number of steps after which an episode is truncated; at least 1; None for the default above.
        autoreset_mode: see `TaskVectorEnv`.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> env = ColorCubesVectorEnv(1, size=2, cubes=1, targets=1)
        >>> env.reset(seed=0)[0][0]  # lower row, left column; color 0; the cube is to the right
        array([0., 1., 1., 0., 1., 0., 0., 0., 1.], dtype=float32)
        >>> env.step([3])[0][0]  # now the agent stands on it, and sees nothing
        array([0., 1., 0., 1., 1., 0., 0., 0., 0.], dtype=float32)
        >>> env.step([4])[1]
        array([1.])
    """

    def __init__(
        self,
        num_envs: int = 1,
        size: int = 5,
        cubes: int = 3,
        targets: int = 5,
        teleport: float = 0.1,
        hide_colors: bool = False,
        max_episode_steps: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        self._task = ColorCubes(size, cubes, targets, teleport, hide_colors, max_episode_steps)
        super().__init__(self._task, num_envs, autoreset_mode)

    def draw(self, row: int) -> Frame:
        """Return an image of the grid with all cubes, the target framed, and the agent."""
        canvas, cell = Canvas(200, 200), 190 / self._task.size

        def corner(place: int, inset: float) -> tuple[float, float]:
            return 5 + (place % self._task.size + inset) * cell, 5 + (place // self._task.size + inset) * cell

        for place in range(self._task.size**2):
            canvas.rectangle(corner(place, 0.03), corner(place, 0.97), LIGHT)
        number = min(int(self.state["found"][row]), self._task.targets)
        for name, place in enumerate(self.state["cells"][:, row].tolist()):
            if name == self.state["colors"][number, row]:
                canvas.rectangle(corner(place, 0.1), corner(place, 0.9), BLACK)
            canvas.rectangle(corner(place, 0.2), corner(place, 0.8), _COLORS[name % len(_COLORS)])
        canvas.circle(corner(int(self.state["agent"][row]), 0.5), cell / 6, BLACK)
        return canvas.pixels

    @staticmethod
    def optimal_return(
        size: int = 5,
        cubes: int = 3,
        targets: int = 5,
        teleport: float = 0.1,
        hide_colors: bool = False,
        max_episode_steps: int | None = None,
    ) -> float:
        """Return the return of an agent that remembers where all cubes are: 1.

        Raises:
            UnsupportedError: the step limit may end an episode earlier.

        Example:
            >>> ColorCubesVectorEnv.optimal_return(size=8)
            1.0
        """
        if _step_limit(size, targets, max_episode_steps) < _needed(size, targets):
            raise UnsupportedError(
                f"the optimal return of ColorCubes is known from {_needed(size, targets)} steps on; got "
                f"max_episode_steps={max_episode_steps}"
            )
        return 1.0

    @staticmethod
    def memoryless_return(
        size: int = 5,
        cubes: int = 3,
        targets: int = 5,
        teleport: float = 0.1,
        hide_colors: bool = False,
        max_episode_steps: int | None = None,
    ) -> float:
        """Return the rounded mean return of the best known policy of the current observation.

        Raises:
            UnsupportedError: it wasn't measured for these arguments.

        Example:
            >>> ColorCubesVectorEnv.memoryless_return()
            0.4
        """
        if (size, cubes, targets, teleport, hide_colors, max_episode_steps) != (5, 3, 5, 0.1, False, None):
            raise UnsupportedError("the memoryless return of ColorCubes was measured with its default arguments only")
        return _MEMORYLESS_RETURN


class ColorCubesEnv(TaskEnv):
    """Collect cubes that are seen only when one of them has moved (`recurl/ColorCubes-v0`): one row of the vector task.

    See `ColorCubesVectorEnv` for observation, actions, reward, end of the episode, optimal and memoryless return.

    Args:
        size: number of rows and columns of the grid; at least 2.
        cubes: number of cubes, each of its own color; at least 1, and fewer than half of the cells.
        targets: number of cubes to collect; at least 1.
        teleport: probability in each step that a cube other than the target teleports, from 0 to 1.
        hide_colors: after the first step, show where cubes are but not their colors.
        max_episode_steps: number of steps after which an episode is truncated; at least 1; None for
            `2 targets (2 size - 1)`. `gymnasium.make` does not forward an argument of this name, but wraps the
            environment in a `TimeLimit`, which can only lower the limit.
        render_mode: see `TaskEnv`.

    Example:
        >>> env = ColorCubesEnv()
        >>> env.reset(seed=0)[0].shape, env.step(4)[1]
        ((88,), -0.02)
    """

    def __init__(
        self,
        size: int = 5,
        cubes: int = 3,
        targets: int = 5,
        teleport: float = 0.1,
        hide_colors: bool = False,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        rows = ColorCubesVectorEnv(
            1, size, cubes, targets, teleport, hide_colors, max_episode_steps, AutoresetMode.DISABLED
        )
        super().__init__(rows, render_mode)
