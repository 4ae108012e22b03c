"""RockSample: find out with a noisy sensor which rocks are good, and sample these on the way to the exit."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.seeding import derive_seed
from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
from recurl.envs.tasks.drawing import BLUE, GREEN, LIGHT, RED, Canvas, Frame
from recurl.envs.tasks.dynamics import Dynamics, State, check_count, is_number
from recurl.envs.tasks.namespaces import Draw, Namespace

SAMPLE, CHECK = 4, 5
"""The action after north, east, south and west, and the first of those that check a rock."""

_MOVES = np.array([[-1, 0], [0, 1], [1, 0], [0, -1]])  # rows and columns, by action
_ROCK, _EXIT = 10.0, 10.0
_MOST_ROCKS = 12  # for the bound, whose computation takes 2^rocks steps
_MEMORYLESS_RETURN = 17.7  # measured with default arguments


class RockSample(Dynamics):
    """Dynamics of `recurl/RockSample-v0`: see `RockSampleVectorEnv`.

    State: `good`, whether each rock is, bool `[rocks, rows]`; `cell`, of the agent, int64 `[rows]`; `reading`, the rock
    that was checked in the last step plus one, negative for a bad reading, or 0, int64 `[rows]`; `luck`, the random
    number of each step, float64 `[step_limit + 1, rows]`.

    Args:
        size: number of rows and columns of the grid; at least 2.
        rocks: number of rocks; at least 1, and at most one per cell.
        layout: number of the arrangement of rocks; at least 0.
        half_distance: distance at which the sensor's advantage over guessing is halved; above 0.
        discount: factor of the reward from step to step, above 0 and at most 1.
        max_episode_steps: number of steps after which an episode is truncated; at least 1.

    Raises:
        ArgumentError: an argument is out of range.

    Attributes:
        places: row and column of each rock, `[rocks, 2]`.
    """

    def __init__(
        self,
        size: int = 7,
        rocks: int = 8,
        layout: int = 0,
        half_distance: float = 20.0,
        discount: float = 0.95,
        max_episode_steps: int = 100,
    ) -> None:
        self.size = check_count("size", size, minimum=2)
        self.rocks = check_count("rocks", rocks, minimum=1)
        if rocks > size**2:
            raise ArgumentError(f"rocks must be at most one for each of the {size**2} cells; got {rocks}")
        check_count("layout", layout, minimum=0)
        if not is_number(half_distance) or not 0 < half_distance < float("inf"):
            raise ArgumentError(f"half_distance must be a number above 0; got {half_distance!r}")
        if not is_number(discount) or not 0 < discount <= 1:
            raise ArgumentError(f"discount must be above 0 and at most 1; got {discount!r}")
        check_count("max_episode_steps", max_episode_steps, minimum=1)
        space = Box(-1.0, 1.0, (2 * size + rocks,), np.float32)
        super().__init__(observation_space=space, actions=CHECK + rocks, step_limit=max_episode_steps)
        self.discount = float(discount)
        self.places = _places(size, rocks, layout)
        cells = np.stack(np.divmod(np.arange(size**2), size), axis=-1)
        distances = np.linalg.norm(cells[:, None] - self.places, axis=-1)
        self._accuracy = (0.5 + 0.5 * 2.0 ** (-distances / half_distance)).ravel()  # by cell and rock
        self._here = distances.T == 0  # [rocks, cells]
        self._worth = self.discount ** np.arange(self.step_limit + 1)
        self._line, self._names = np.arange(size)[:, None], np.arange(rocks)[:, None]

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Draw which rocks are good and the luck of the sensor, and place the agent in the middle of the west edge."""
        good = draw.integers(2, (self.rocks,)) == 1
        cell = xp.full(good.shape[1:], self.size // 2 * self.size, dtype=xp.int64)
        luck = draw.uniform(0.0, 1.0, (self.step_limit + 1,))
        return {"good": good, "cell": cell, "reading": xp.zeros_like(cell), "luck": luck}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Move, sample, or check a rock."""
        good, cell = state["good"], state["cell"]
        row, column = cell // self.size, cell % self.size
        moves = actions < SAMPLE
        step = xp.take(xp.asarray(_MOVES), xp.where(moves, actions, 0))
        leaves = moves & (column + step[:, 1] >= self.size)
        to_row = xp.clip(row + step[:, 0], 0, self.size - 1)
        to_column = xp.clip(column + step[:, 1], 0, self.size - 1)
        sampled = xp.take(xp.asarray(self._here), cell, axis=1) & (actions == SAMPLE)
        found, spoilt = xp.any(sampled & good, axis=0), xp.any(sampled & ~good, axis=0)
        reward = _ROCK * xp.astype(found, xp.float64) - _ROCK * xp.astype(spoilt, xp.float64)
        reward = reward + _EXIT * xp.astype(leaves, xp.float64)
        rock = xp.maximum(actions - CHECK, 0)
        is_right = xp.pick(state["luck"], steps) < xp.take(xp.asarray(self._accuracy), cell * self.rocks + rock)
        sign = xp.where(is_right == xp.pick(good, rock), 1, -1)
        after = {
            "good": good & ~sampled,
            "cell": xp.where(moves, to_row * self.size + to_column, cell),
            "reading": xp.where(actions >= CHECK, sign * (rock + 1), 0),
        }
        return {**state, **after}, reward * xp.take(xp.asarray(self._worth), steps), leaves

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the agent's row and column, and the reading of the last check."""
        line, names, cell, reading = xp.asarray(self._line), xp.asarray(self._names), state["cell"], state["reading"]
        read = xp.sign(reading) * (xp.abs(reading) == names + 1)
        at = [xp.astype(line == place, xp.int64) for place in (cell // self.size, cell % self.size)]
        return xp.astype(xp.concat([*at, read]).T, xp.float32)


def _places(size: int, rocks: int, layout: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(derive_seed(layout, f"rocks of RockSample, {size}, {rocks}"))
    return np.stack(np.divmod(rng.permutation(size**2)[:rocks], size), axis=-1)


class RockSampleVectorEnv(TaskVectorEnv):
    """Sample good rocks and leave (`recurl/RockSample-v0`, vectorized).

    RockSample(size, rocks) of Smith and Simmons (2004), "Heuristic Search Value Iteration for POMDPs": a rover knows
    where it and the rocks are, but not which rocks are good: each is with probability 1/2. It checks them with a sensor
    whose readings get worse with distance, and has to remember them.

    Differences: rewards are multiplied by `discount` at each step, so that the return is the discounted return of the
    literature, without which time costs nothing, and a rover without memory could check each rock while it stands on
    it. The rocks of a `layout` are at random cells, not at those of the paper. Episodes are truncated.

    Observation: float32 `[2 size + rocks]`: the agent's row and column, one-hot; and for each rock, 1 or -1 if it was
    checked in the last step and seemed good or bad, else 0. Rocks are at the same cells in all episodes.
    Actions: `Discrete(5 + rocks)`: 0 north, 1 east, 2 south, 3 west, 4 sample, 5 and on check a rock. A move off the
    grid does nothing, but the one to the east leaves through the exit.
    Reward: `discount^t`, t the number of previous steps, times 10 for sampling a good rock, which makes it bad, and for
    leaving; times -10 for sampling a bad rock; else 0. A reading at distance d is right with probability
    `(1 + 2^(-d / half_distance)) / 2`.
    Episode: begins in the middle of the west edge; terminated by leaving; truncated after `max_episode_steps`.

    Optimal return: at most that of a rover that knows which rocks are good, whose best way is computed for every subset
    of good rocks: 28.1 with default arguments. No policy reaches this bound, as readings take time and are noisy; the
    true optimum is not known, but a scripted player that remembers its readings gains 21.2.

    Best memoryless return: about 17.7 with default arguments, measured, as no closed form is known: a policy that
    visits seven rocks on the best way of a search, checks each on its cell, where the sensor doesn't err, samples it if
    it is good, and leaves.

    Args:
        num_envs: number of rows.
        size: number of rows and columns of the grid; at least 2.
        rocks: number of rocks; at least 1, and at most one per cell.
        layout: number of the arrangement of rocks; at least 0.
        half_distance: distance at which the sensor's advantage over guessing is halved; above 0.
        discount: factor of the reward from step to step, above 0 and at most 1.
        max_episode_steps: number of steps after which an episode is truncated; at least 1.
        autoreset_mode: see `TaskVectorEnv`.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> env = RockSampleVectorEnv(1, size=2, rocks=1)
        >>> env.reset(seed=0)[0][0]  # lower row, left column, nothing checked
        array([0., 1., 1., 0., 0.], dtype=float32)
        >>> env.step([5])[0][0]
        array([0., 1., 1., 0., 1.], dtype=float32)
        >>> [env.step([1])[1].item() for _ in range(2)]  # the third step leaves
        [0.0, 9.025]
    """

    def __init__(
        self,
        num_envs: int = 1,
        size: int = 7,
        rocks: int = 8,
        layout: int = 0,
        half_distance: float = 20.0,
        discount: float = 0.95,
        max_episode_steps: int = 100,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        self._task = RockSample(size, rocks, layout, half_distance, discount, max_episode_steps)
        super().__init__(self._task, num_envs, autoreset_mode)

    def draw(self, row: int) -> Frame:
        """Return an image of the grid: good rocks in green, bad ones in red, and the agent."""
        canvas, cell = Canvas(200, 200), 190 / self._task.size

        def point(place: Any, inset: float) -> tuple[float, float]:
            return 5 + (float(place[1]) + inset) * cell, 5 + (float(place[0]) + inset) * cell

        for place in np.ndindex(self._task.size, self._task.size):
            canvas.rectangle(point(place, 0.03), point(place, 0.97), LIGHT)
        for place, good in zip(self._task.places, self.state["good"][:, row], strict=True):
            canvas.circle(point(place, 0.5), 0.35 * cell, GREEN if good else RED)
        canvas.circle(point(np.divmod(self.state["cell"][row], self._task.size), 0.5), 0.2 * cell, BLUE)
        return canvas.pixels

    @staticmethod
    def optimal_return(
        size: int = 7,
        rocks: int = 8,
        layout: int = 0,
        half_distance: float = 20.0,
        discount: float = 0.95,
        max_episode_steps: int = 100,
    ) -> float:
        """Return the expected return of the best policy that knows which rocks are good, an upper bound for all others.

        The step limit is ignored.

        Raises:
            UnsupportedError: the computation would take too long, due to many rocks.

        Example:
            >>> round(RockSampleVectorEnv.optimal_return(), 1)
            28.1
        """
        if rocks > _MOST_ROCKS:
            raise UnsupportedError(f"The bound of RockSample is computed for up to {_MOST_ROCKS} rocks; got {rocks}.")
        return _bound(size, rocks, layout, discount)

    @staticmethod
    def memoryless_return(
        size: int = 7,
        rocks: int = 8,
        layout: int = 0,
        half_distance: float = 20.0,
        discount: float = 0.95,
        max_episode_steps: int = 100,
    ) -> float:
        """Return the rounded mean return of the best known policy of the current observation.

        Raises:
            UnsupportedError: it wasn't measured for these arguments.

        Example:
            >>> RockSampleVectorEnv.memoryless_return()
            17.7
        """
        if (size, rocks, layout, half_distance, discount, max_episode_steps) != (7, 8, 0, 20.0, 0.95, 100):
            raise UnsupportedError("the memoryless return of RockSample was measured with its default arguments only")
        return _MEMORYLESS_RETURN


@cache
def _bound(size: int, rocks: int, layout: int, discount: float) -> float:
    """Return the mean over subsets of good rocks of the best return of collecting them and leaving."""
    places = np.concatenate([_places(size, rocks, layout), [[size // 2, 0]]])  # the last is the start
    steps = np.abs(places[:, None] - places).sum(-1)
    leaving = _EXIT * discount ** (size - 1.0 - places[:, 1])
    values = np.empty((2**rocks, rocks + 1))  # by the good rocks that are left, and the place
    for left in range(2**rocks):
        values[left] = leaving
        for rock in range(rocks):
            if left >> rock & 1:
                after = _ROCK + discount * values[left ^ 1 << rock, rock]
                values[left] = np.maximum(values[left], discount ** steps[:, rock] * after)
    return float(values[:, -1].mean())


class RockSampleEnv(TaskEnv):
    """Sample good rocks and leave (`recurl/RockSample-v0`): one row of `RockSampleVectorEnv`, which has the details.

    Args:
        size: number of rows and columns of the grid; at least 2.
        rocks: number of rocks; at least 1, and at most one per cell.
        layout: number of the arrangement of rocks; at least 0.
        half_distance: distance at which the sensor's advantage over guessing is halved; above 0.
        discount: factor of the reward from step to step, above 0 and at most 1.
        max_episode_steps: number of steps after which an episode is truncated; at least 1. `gymnasium.make` does not
            forward an argument of this name, but wraps the environment in a `TimeLimit`, which can only lower the
            limit.
        render_mode: see `TaskEnv`.

    Example:
        >>> env = RockSampleEnv(size=3, rocks=2)
        >>> _ = env.reset(seed=0)
        >>> [env.step(1)[1:3] for _ in range(3)]
        [(0.0, False), (0.0, False), (9.025, True)]
    """

    def __init__(
        self,
        size: int = 7,
        rocks: int = 8,
        layout: int = 0,
        half_distance: float = 20.0,
        discount: float = 0.95,
        max_episode_steps: int = 100,
        render_mode: str | None = None,
    ) -> None:
        rows = RockSampleVectorEnv(
            1, size, rocks, layout, half_distance, discount, max_episode_steps, AutoresetMode.DISABLED
        )
        super().__init__(rows, render_mode)
