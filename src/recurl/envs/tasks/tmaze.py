"""TMaze: a cue at the start indicates the turn to take at the end of the corridor."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
from recurl.envs.tasks.drawing import BLUE, GREEN, LIGHT, Canvas, Frame
from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace

FORWARD, LEFT, RIGHT = 0, 1, 2

# Observations: [cue left, cue right, in the corridor, at the junction].
_OBSERVATIONS = np.array([[1, 0, 1, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=np.float32)
_CORRIDOR = 2  # row of the corridor; the next one is the junction

# Rewards by place (corridor, junction), cue (left, right) and action (forward, left, right).
_IDLE = -0.1
_REWARD = np.array([[[0, _IDLE, _IDLE], [0, _IDLE, _IDLE]], [[_IDLE, 1, 0], [_IDLE, 0, 1]]], dtype=np.float64).ravel()


def _step_limit(corridor_length: int, max_episode_steps: int | None) -> int:
    return 4 * (corridor_length + 1) if max_episode_steps is None else max_episode_steps


class TMaze(Dynamics):
    """Dynamics of `recurl/TMaze-v0`: see `TMazeVectorEnv`.

    State: `cue` (0 left, 1 right) and `place`, int64 `[rows]`.

    Args:
        corridor_length: number of steps from the start to the junction; at least 1.
        max_episode_steps: number of steps after which an episode is truncated; at least 1; None for the default.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, corridor_length: int = 20, max_episode_steps: int | None = None) -> None:
        self.junction = check_count("corridor_length", corridor_length, minimum=1)
        limit = check_count("max_episode_steps", _step_limit(corridor_length, max_episode_steps), minimum=1)
        super().__init__(observation_space=Box(0.0, 1.0, (4,), np.float32), actions=3, step_limit=limit)

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Draw the cue, and place the agent at the start."""
        cue = draw.integers(2)
        return {"cue": cue, "place": xp.zeros_like(cue)}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Move forward or turn."""
        cue, place = state["cue"], state["place"]
        at_junction = place == self.junction
        forward = actions == FORWARD
        reward = xp.asarray(_REWARD)[at_junction * 6 + cue * 3 + actions]
        return {"cue": cue, "place": place + (forward & ~at_junction)}, reward, at_junction & ~forward

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the cue at the first step, and the kind of place at later steps."""
        kind = _CORRIDOR + (state["place"] == self.junction)
        return xp.take(xp.asarray(_OBSERVATIONS), xp.where(steps == 0, state["cue"], kind))


class TMazeVectorEnv(TaskVectorEnv):
    """Walk down a corridor and turn as the cue at its start indicated (`recurl/TMaze-v0`, vectorized).

    The task of Bakker (2002), "Reinforcement Learning with Long Short-Term Memory", without moving back: the agent
    starts at place 0, and the junction is place `corridor_length`. The cue, left or right with probability 1/2, is
    shown with the first observation only and must be remembered for `corridor_length` steps.

    Observation: float32 `[4]`: cue left, cue right (one of them is 1 at the first step, both are 0 later), in the
    corridor, at the junction (one of the two is 1).
    Actions: `Discrete(3)`: 0 forward, 1 left, 2 right.
    Reward: in the corridor 0 for a step forward, -0.1 for a turn (into the wall); at the junction 1 for the turn that
    the cue indicated, 0 for the other turn, -0.1 for a step forward (into the wall). The agent does not move when it
    hits a wall. (The penalty is Bakker's: without it, only successful episodes would teach the agent to walk.)
    Episode: terminated by a turn at the junction; truncated after `max_episode_steps`, by default
    `4 (corridor_length + 1)`, so that a random agent (3 steps for each place, on average) reaches the junction in
    nearly every episode.

    Optimal return: 1. The `corridor_length` steps forward have reward 0, and the indicated turn gives 1, the maximum of
    an episode.

    Best memoryless return: 1/2. The only positive reward of an episode is 1 for the correct turn at the junction, whose
    observation is the same for both cues. A policy of this observation alone turns left with the same probability p for
    both cues, so the first turn, which ends the episode, is correct with probability `p/2 + (1 - p)/2 = 1/2`; walking
    straight and turning left attains it. (The bound holds for policies of the observation alone: a policy that also
    observes the time could encode the cue in the time at which it arrives.)

    Args:
        num_envs: number of rows.
        corridor_length: number of steps from the start to the junction; at least 1.
        max_episode_steps: number of steps after which an episode is truncated; at least 1; None for the default above.
        autoreset_mode: see `TaskVectorEnv`.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> env = TMazeVectorEnv(2, corridor_length=1)
        >>> cue, _ = env.reset(seed=0)
        >>> cue.tolist()
        [[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]]
        >>> env.step([0, 0])[0].tolist()
        [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
        >>> env.step([2, 2])[1]
        array([1., 0.])
    """

    def __init__(
        self,
        num_envs: int = 1,
        corridor_length: int = 20,
        max_episode_steps: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        self._task = TMaze(corridor_length, max_episode_steps)
        super().__init__(self._task, num_envs, autoreset_mode)

    def draw(self, row: int) -> Frame:
        """Return an image of the maze, with the arm indicated by the cue in green while the cue is shown."""
        canvas = Canvas(300, 120)
        cell = 270 / (self._task.junction + 1)
        half = min(cell, 40) / 2

        def place(number: int) -> float:
            return 15 + (number + 0.5) * cell

        canvas.rectangle((15, 60 - half), (285, 60 + half), LIGHT)
        canvas.rectangle((285 - 2 * half, 10), (285, 110), LIGHT)
        if self._steps[row] == 0:
            top = 10 if self.state["cue"][row] == 0 else 70
            canvas.rectangle((285 - 2 * half, top), (285, top + 40), GREEN)
        canvas.circle((place(int(self.state["place"][row])), 60), 0.8 * half, BLUE)
        return canvas.pixels

    @staticmethod
    def optimal_return(corridor_length: int = 20, max_episode_steps: int | None = None) -> float:
        """Return the return of an agent that remembers the cue: 1, or 0 if the step limit ends episodes too early.

        Example:
            >>> TMazeVectorEnv.optimal_return(corridor_length=50)
            1.0
        """
        return 1.0 if corridor_length < _step_limit(corridor_length, max_episode_steps) else 0.0

    @staticmethod
    def memoryless_return(corridor_length: int = 20, max_episode_steps: int | None = None) -> float:
        """Return the expected return of the best policy of the current observation alone: half the optimal one.

        Example:
            >>> TMazeVectorEnv.memoryless_return()
            0.5
        """
        return 0.5 * TMazeVectorEnv.optimal_return(corridor_length, max_episode_steps)


class TMazeEnv(TaskEnv):
    """Walk down a corridor and turn as the cue at its start indicated (`recurl/TMaze-v0`): one row of `TMazeVectorEnv`.

    See there for observation, actions, reward, end of the episode, optimal (1) and best memoryless return (1/2).

    Args:
        corridor_length: number of steps from the start to the junction; at least 1.
        max_episode_steps: number of steps after which an episode is truncated; at least 1; None for
            `4 (corridor_length + 1)`. `gymnasium.make` does not forward an argument of this name, but wraps the
            environment in a `TimeLimit`, which can only lower the limit.
        render_mode: see `TaskEnv`.

    Example:
        >>> env = TMazeEnv(corridor_length=2)
        >>> cue, _ = env.reset(seed=0)
        >>> turn = 1 if cue[0] else 2
        >>> [env.step(action)[1] for action in (0, 1, 0, turn)]  # the second step runs into a wall
        [0.0, -0.1, 0.0, 1.0]
    """

    def __init__(
        self, corridor_length: int = 20, max_episode_steps: int | None = None, render_mode: str | None = None
    ) -> None:
        super().__init__(TMazeVectorEnv(1, corridor_length, max_episode_steps, AutoresetMode.DISABLED), render_mode)
