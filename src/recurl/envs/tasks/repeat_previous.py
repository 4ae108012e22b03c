"""RepeatPrevious: name the symbol shown k steps ago."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from recurl.core.errors import ArgumentError
from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
from recurl.envs.tasks.drawing import BLUE, GREEN, GREY, LIGHT, Canvas, Frame
from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace

_MAX_DRAWN = 40
"""Maximum number of symbols in an image."""


class RepeatPrevious(Dynamics):
    """Dynamics of `recurl/RepeatPrevious-v0`: see `RepeatPreviousVectorEnv`.

    State: `symbols`, int64 `[k + episode_length + 1, rows]`, all symbols of the episode.

    Args:
        k: age of the symbol to repeat, in steps; at least 1.
        num_symbols: number of symbols; at least 2.
        episode_length: number of steps of an episode; more than k.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, k: int = 4, num_symbols: int = 4, episode_length: int = 64) -> None:
        self.k = check_count("k", k, minimum=1)
        self.num_symbols = check_count("num_symbols", num_symbols, minimum=2)
        if check_count("episode_length", episode_length, minimum=2) <= k:
            raise ArgumentError(f"episode_length must be more than k; got episode_length={episode_length} and k={k}")
        space = Box(0.0, 1.0, (num_symbols,), np.float32)
        super().__init__(observation_space=space, actions=num_symbols, step_limit=episode_length)
        self._reward = 1.0 / (episode_length - k)
        self._one_hot = np.eye(num_symbols, dtype=np.float32)

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Draw the symbols."""
        # Entry k + t holds s_t, so entry t holds the answer of step t. The first k are -1, which equals no action.
        shown = draw.integers(self.num_symbols, (self.step_limit + 1,))
        return {"symbols": xp.concat((xp.full((self.k, shown.shape[1]), -1, dtype=xp.int64), shown))}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Score the answer."""
        right = xp.pick(state["symbols"], steps) == actions
        return state, right * self._reward, xp.zeros(len(right), dtype=xp.bool)

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the symbol of this step."""
        return xp.take(xp.asarray(self._one_hot), xp.pick(state["symbols"][self.k :], steps))


class RepeatPreviousVectorEnv(TaskVectorEnv):
    """Name the symbol shown k steps ago (`recurl/RepeatPrevious-v0`, vectorized).

    Based on POPGym's RepeatPrevious (Morad et al., 2023, "POPGym: Benchmarking Partially Observable Reinforcement
    Learning"), with symbols drawn independently and rewards in [0, 1].

    Observation: a symbol `s_t`, uniform over `num_symbols` and independent of everything else, one-hot: float32
    `[num_symbols]`. Action `a_t`, chosen after seeing `s_0 ... s_t`: `Discrete(num_symbols)`.
    Reward: `1 / (episode_length - k)` if `a_t == s_{t-k}`, else 0; always 0 in the first k steps.
    Episode: truncated after `episode_length` steps, never terminated, as the task itself has no end. The agent does not
    observe the time, and its actions don't affect later observations.

    Optimal return: 1, by remembering k symbols: `episode_length - k` answers are rewarded, and all are known.

    Best memoryless return: `1 / num_symbols`. Given the current symbol (and even the time), `s_{t-k}` is uniform as k
    >= 1, so every answer is correct with probability `1 / num_symbols`; the expected return is `episode_length - k`
    times `1 / (episode_length - k)` times that. An agent that remembers fewer than k steps does no better.

    Args:
        num_envs: number of rows.
        k: age of the symbol to repeat, in steps; at least 1.
        num_symbols: number of symbols; at least 2.
        episode_length: number of steps of an episode; more than k.
        autoreset_mode: see `TaskVectorEnv`.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> env = RepeatPreviousVectorEnv(2, k=1, num_symbols=3, episode_length=4)
        >>> first, _ = env.reset(seed=0)
        >>> second, reward, terminated, truncated, _ = env.step([0, 0])  # nothing to repeat yet
        >>> reward
        array([0., 0.])
        >>> _, reward, _, _, _ = env.step(first.argmax(-1))
        >>> reward
        array([0.33333333, 0.33333333])
    """

    def __init__(
        self,
        num_envs: int = 1,
        k: int = 4,
        num_symbols: int = 4,
        episode_length: int = 64,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        self._task = RepeatPrevious(k, num_symbols, episode_length)
        super().__init__(self._task, num_envs, autoreset_mode)

    def get_state(self) -> dict[str, Any]:
        """Return the complete state of all rows; symbols are `[num_envs, ...]`, as in earlier saved states."""
        state = super().get_state()
        return {**state, "symbols": state["symbols"].T.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `get_state`."""
        super().set_state({name: np.transpose(value) if name == "symbols" else value for name, value in state.items()})

    def draw(self, row: int) -> Frame:
        """Return an image of the symbols of the last k steps: the current one at the right, the answer in green."""
        canvas = Canvas(300, 100)
        k = self._task.k
        step, shown = int(self._steps[row]), min(k + 1, _MAX_DRAWN)
        cell, height = 280 / shown, 80 / self._task.num_symbols
        for age in range(shown):
            symbol = int(self.state["symbols"][step + k - age, row])
            left = 290 - (age + 1) * cell
            canvas.rectangle((left, 10), (left + cell - 2, 90), LIGHT)
            if symbol >= 0:
                color = GREEN if age == k else BLUE if age == 0 else GREY
                canvas.rectangle((left, 10 + symbol * height), (left + cell - 2, 10 + (symbol + 1) * height), color)
        return canvas.pixels

    @staticmethod
    def optimal_return(k: int = 4, num_symbols: int = 4, episode_length: int = 64) -> float:
        """Return the return of an agent that remembers k steps: 1, for all arguments.

        Example:
            >>> RepeatPreviousVectorEnv.optimal_return(k=8)
            1.0
        """
        return 1.0

    @staticmethod
    def memoryless_return(k: int = 4, num_symbols: int = 4, episode_length: int = 64) -> float:
        """Return the expected return of the best policy of the current symbol alone: chance level.

        Example:
            >>> RepeatPreviousVectorEnv.memoryless_return(num_symbols=8)
            0.125
        """
        return 1.0 / num_symbols


class RepeatPreviousEnv(TaskEnv):
    """Name the symbol shown k steps ago (`recurl/RepeatPrevious-v0`): one row of `RepeatPreviousVectorEnv`.

    See there for observation, actions, reward, end of the episode, optimal (1) and best memoryless return
    (`1 / num_symbols`).

    Args:
        k: age of the symbol to repeat, in steps; at least 1.
        num_symbols: number of symbols; at least 2.
        episode_length: number of steps of an episode; more than k.
        render_mode: see `TaskEnv`.

    Example:
        >>> env = RepeatPreviousEnv(k=2)
        >>> observation, _ = env.reset(seed=0)
        >>> seen = [observation.argmax()]
        >>> total, truncated = 0.0, False
        >>> while not truncated:
        ...     observation, reward, _, truncated, _ = env.step(seen[-3] if len(seen) > 2 else 0)
        ...     seen.append(observation.argmax())
        ...     total += reward
        >>> round(total, 6)
        1.0
    """

    def __init__(
        self, k: int = 4, num_symbols: int = 4, episode_length: int = 64, render_mode: str | None = None
    ) -> None:
        rows = RepeatPreviousVectorEnv(1, k, num_symbols, episode_length, AutoresetMode.DISABLED)
        super().__init__(rows, render_mode)
