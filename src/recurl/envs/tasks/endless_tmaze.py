"""EndlessTMaze: corridors in a row, each with a cue of its own that replaces the one before."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
from recurl.envs.tasks.drawing import BLUE, GREEN, GREY, LIGHT, Canvas, Frame
from recurl.envs.tasks.dynamics import Dynamics, State, check_count, check_flag
from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.envs.tasks.tmaze import FORWARD, LEFT

# Observations: [cue left, cue right, in the corridor, at the junction].
_OBSERVATIONS = np.array([[1, 0, 1, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=np.float32)
_CORRIDOR = 2  # row of the corridor; the next one is the junction
_WALL = -0.1  # reward of running into a wall, divided by the number of corridors


def _step_limit(corridor_length: int, corridors: int, max_episode_steps: int | None) -> int:
    return 4 * (corridor_length + 1) * corridors if max_episode_steps is None else max_episode_steps


class EndlessTMaze(Dynamics):
    """Dynamics of `recurl/EndlessTMaze-v0`: see `EndlessTMazeVectorEnv`.

    State: `cues` (0 left, 1 right) and `lengths`, int64 `[corridors, rows]`; `corridor`, the number of corridors
    passed, and `place`, int64 `[rows]`.

    Args:
        corridor_length: number of steps from the start of a corridor to its junction; at least 1.
        corridors: number of corridors; at least 1.
        random_lengths: draw the length of each corridor from 1 to `corridor_length`.
        max_episode_steps: number of steps after which an episode is truncated; at least 1; None for the default.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        corridor_length: int = 10,
        corridors: int = 5,
        random_lengths: bool = False,
        max_episode_steps: int | None = None,
    ) -> None:
        self.corridor_length = check_count("corridor_length", corridor_length, minimum=1)
        self.corridors = check_count("corridors", corridors, minimum=1)
        self.random_lengths = check_flag("random_lengths", random_lengths)
        limit = _step_limit(corridor_length, corridors, max_episode_steps)
        check_count("max_episode_steps", limit, minimum=1)
        super().__init__(observation_space=Box(0.0, 1.0, (4,), np.float32), actions=3, step_limit=limit)

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Draw the cues and the lengths, and place the agent at the start of the first corridor."""
        cues = draw.integers(2, (self.corridors,))
        lengths = xp.full_like(cues, self.corridor_length)
        if self.random_lengths:
            lengths = 1 + draw.integers(self.corridor_length, (self.corridors,))
        return {"cues": cues, "lengths": lengths, "corridor": xp.zeros_like(cues[0]), "place": xp.zeros_like(cues[0])}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Move forward, or turn."""
        cue, at_junction = self._here(xp, state)
        forward = actions == FORWARD
        passes = at_junction & (actions == cue + LEFT)
        reward = passes + _WALL * xp.astype(forward == at_junction, xp.float64)
        corridor = state["corridor"] + passes
        place = xp.where(passes, 0, state["place"] + (forward & ~at_junction))
        ends = (at_junction & ~forward & ~passes) | (corridor >= self.corridors)
        return {**state, "corridor": corridor, "place": place}, reward / self.corridors, ends

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the cue at the start of a corridor, and the kind of place elsewhere."""
        cue, at_junction = self._here(xp, state)
        return xp.take(xp.asarray(_OBSERVATIONS), xp.where(state["place"] == 0, cue, _CORRIDOR + at_junction))

    def _here(self, xp: Namespace, state: State) -> tuple[Any, Any]:
        """Return the cue of the present corridor, and whether the agent is at its junction."""
        corridor = xp.minimum(state["corridor"], self.corridors - 1)  # the last one also after its end
        return xp.pick(state["cues"], corridor), state["place"] == xp.pick(state["lengths"], corridor)


class EndlessTMazeVectorEnv(TaskVectorEnv):
    """Turn at the end of each corridor as its own cue indicated (`recurl/EndlessTMaze-v0`, vectorized).

    The Endless T-Maze of Shchendrigin et al. (2026), "Memory Retention Is Not Enough to Master Memory Tasks in
    Reinforcement Learning" (arXiv 2601.15086), which tests that a memory is rewritten: each correct turn leads into
    the next corridor, whose cue replaces the one before. `random_lengths=False` is the regime Fixed of the paper,
    `True` its Uniform.

    Differences: the observation has no position along the corridor, so that the cue has to be remembered without a
    count of steps; a correct turn gives `1 / corridors` instead of 1, and a wrong one 0 instead of -1, so that the
    return is the part of the corridors that was passed; the cost of a step is replaced by one of running into a wall,
    as in `recurl/TMaze-v0`.

    Observation: float32 `[4]`: cue left, cue right (one of them is 1 at place 0 of a corridor, both are 0 elsewhere),
    in the corridor, at the junction (one of the two is 1).
    Actions: `Discrete(3)`: 0 forward, 1 left, 2 right.
    Reward: `1 / corridors` for the turn that the latest cue indicated; `-0.1 / corridors` for a turn in the corridor
    or a step forward at the junction (into the wall, without moving); else 0.
    Episode: terminated by a wrong turn, and by the last correct one; truncated after `max_episode_steps`, by default
    `4 (corridor_length + 1) corridors`.

    Optimal return: 1, by remembering the latest cue, if the step limit is not too low.

    Best memoryless return: `(1 - 2^-corridors) / corridors`. At every junction the observation is the same, and its cue
    is left or right with probability 1/2 whatever happened before, so every turn is correct with probability 1/2,
    and the i-th turn is reached with probability `2^-(i - 1)`. An agent that keeps the first cue instead of the latest,
    retention without rewriting, gains `(2 - 2^-(corridors - 1)) / corridors`.

    Args:
        num_envs: number of rows.
        corridor_length: number of steps from the start of a corridor to its junction; at least 1.
        corridors: number of corridors; at least 1.
        random_lengths: draw the length of each corridor from 1 to `corridor_length`.
        max_episode_steps: number of steps after which an episode is truncated; at least 1; None for the default above.
        autoreset_mode: see `TaskVectorEnv`.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> env = EndlessTMazeVectorEnv(1, corridor_length=1, corridors=2)
        >>> env.reset(seed=1)[0].tolist()  # left
        [[1.0, 0.0, 1.0, 0.0]]
        >>> env.step([0])[0].tolist()
        [[0.0, 0.0, 0.0, 1.0]]
        >>> observation, reward, *_ = env.step([1])
        >>> observation.tolist(), reward.tolist()  # the next cue is right
        ([[0.0, 1.0, 1.0, 0.0]], [0.5])
    """

    def __init__(
        self,
        num_envs: int = 1,
        corridor_length: int = 10,
        corridors: int = 5,
        random_lengths: bool = False,
        max_episode_steps: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        self._task = EndlessTMaze(corridor_length, corridors, random_lengths, max_episode_steps)
        super().__init__(self._task, num_envs, autoreset_mode)

    def draw(self, row: int) -> Frame:
        """Return an image of the present corridor, with the arm of its cue in green while the cue is shown."""
        canvas = Canvas(300, 120)
        number = min(int(self.state["corridor"][row]), self._task.corridors - 1)
        cell = 270 / (int(self.state["lengths"][number, row]) + 1)
        half = min(cell, 40) / 2
        canvas.rectangle((15, 60 - half), (285, 60 + half), LIGHT)
        canvas.rectangle((285 - 2 * half, 10), (285, 110), LIGHT)
        place = int(self.state["place"][row])
        if place == 0:
            top = 10 if self.state["cues"][number, row] == 0 else 70
            canvas.rectangle((285 - 2 * half, top), (285, top + 40), GREEN)
        canvas.circle((15 + (place + 0.5) * cell, 60), 0.8 * half, BLUE)
        canvas.rectangle((15, 2), (15 + 270 * float(self.state["corridor"][row]) / self._task.corridors, 6), GREY)
        return canvas.pixels

    @staticmethod
    def optimal_return(
        corridor_length: int = 10,
        corridors: int = 5,
        random_lengths: bool = False,
        max_episode_steps: int | None = None,
    ) -> float:
        """Return the expected return of an agent that remembers the latest cue: 1, or less if the step limit is low.

        Example:
            >>> EndlessTMazeVectorEnv.optimal_return(corridor_length=100)
            1.0
            >>> EndlessTMazeVectorEnv.optimal_return(random_lengths=True)
            1.0
            >>> EndlessTMazeVectorEnv.optimal_return(max_episode_steps=22)  # two corridors of five
            0.4
        """
        limit = _step_limit(corridor_length, corridors, max_episode_steps)
        return sum(_in_time(corridor_length, corridors, random_lengths, limit)) / corridors

    @staticmethod
    def memoryless_return(
        corridor_length: int = 10,
        corridors: int = 5,
        random_lengths: bool = False,
        max_episode_steps: int | None = None,
    ) -> float:
        """Return the expected return of the best policy of the current observation alone.

        Example:
            >>> EndlessTMazeVectorEnv.memoryless_return(corridors=2)
            0.375
        """
        limit = _step_limit(corridor_length, corridors, max_episode_steps)
        reached = _in_time(corridor_length, corridors, random_lengths, limit)
        return sum(chance / 2 ** (number + 1) for number, chance in enumerate(reached)) / corridors


def _in_time(corridor_length: int, corridors: int, random_lengths: bool, limit: int) -> list[float]:
    """Return the probability, for every corridor, that walking straight passes it within the limit."""
    first = 1 if random_lengths else corridor_length
    taken = np.zeros(corridor_length + 2)
    taken[first + 1 :] = 1 / (corridor_length + 1 - first)  # by the steps that a corridor takes
    total, found = np.ones(1), list[float]()
    for _ in range(corridors):
        total = np.convolve(total, taken)[: limit + 1]
        found.append(min(1.0, float(total.sum())))
    return found


class EndlessTMazeEnv(TaskEnv):
    """Turn at the end of each corridor as its own cue indicated (`recurl/EndlessTMaze-v0`): one row of the vector task.

    See `EndlessTMazeVectorEnv` for observation, actions, reward, end of the episode, optimal and memoryless return.

    Args:
        corridor_length: number of steps from the start of a corridor to its junction; at least 1.
        corridors: number of corridors; at least 1.
        random_lengths: draw the length of each corridor from 1 to `corridor_length`.
        max_episode_steps: number of steps after which an episode is truncated; at least 1; None for
            `4 (corridor_length + 1) corridors`. `gymnasium.make` does not forward an argument of this name, but wraps
            the environment in a `TimeLimit`, which can only lower the limit.
        render_mode: see `TaskEnv`.

    Example:
        >>> env = EndlessTMazeEnv(corridor_length=1, corridors=1)
        >>> cue, _ = env.reset(seed=0)
        >>> turn = 1 if cue[0] else 2
        >>> [env.step(action)[1] for action in (turn, 0, 0, turn)]  # twice into a wall
        [-0.1, 0.0, -0.1, 1.0]
    """

    def __init__(
        self,
        corridor_length: int = 10,
        corridors: int = 5,
        random_lengths: bool = False,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        rows = EndlessTMazeVectorEnv(
            1, corridor_length, corridors, random_lengths, max_episode_steps, AutoresetMode.DISABLED
        )
        super().__init__(rows, render_mode)
