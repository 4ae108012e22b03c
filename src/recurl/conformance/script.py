"""Scripted environments: their observations, rewards and ends are given, whatever the actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray

FEATURES = 3
"""Numbers of an observation."""
ACTIONS = 2
"""Number of actions, which change nothing."""
_MOST_STEPS = 128
End: TypeAlias = Literal["terminated", "truncated"]
Floats: TypeAlias = NDArray[np.float64]


class Episode(NamedTuple):
    """Length of an episode in steps, and how it ends."""

    steps: int
    end: End


def terminated(steps: int) -> Episode:
    """Return an episode that is terminated after some steps."""
    return Episode(steps, "terminated")


def truncated(steps: int) -> Episode:
    """Return an episode that is truncated after some steps."""
    return Episode(steps, "truncated")


class Moment(NamedTuple):
    """The place of an observation: the environment, its episode, and the step within the episode, from 0."""

    row: int
    episode: int
    step: int


@dataclass(frozen=True)
class Script:
    """Episodes of several environments, which end at given steps.

    All observations are different random numbers, so that an observation tells its place (:meth:`find`).

    Attributes:
        ends: the episodes of each environment; the one after the last of them doesn't end.
        seed: seed of observations and rewards.
        changed: places of observations that are drawn anew: outputs that depend on them change.
        broken: places of observations that are NaN.
        first: number that is added to the indices of episodes: with 1, the first episode has the observations and
            rewards of the second one of a script with 0.

    Example:
        >>> script = Script([[terminated(2)], []])
        >>> env = script.make(0)
        >>> first, _ = env.reset()
        >>> second, reward, terminated, truncated, _ = env.step(0)
        >>> script.find([first, second])
        [Moment(row=0, episode=0, step=0), Moment(row=0, episode=0, step=1)]
        >>> env.step(1)[2]
        True
    """

    ends: Sequence[Sequence[Episode]]
    seed: int = 0
    changed: frozenset[Moment] = frozenset()
    broken: frozenset[Moment] = frozenset()
    first: int = 0

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return len(self.ends)

    def observation(self, place: Moment) -> NDArray[np.float32]:
        """Return an observation ``[3]``; the last of an episode has the step at which it ends."""
        if place in self.broken:
            return np.full(FEATURES, np.nan, np.float32)
        return self._draw(place, int(place in self.changed)).astype(np.float32)

    def reward(self, place: Moment) -> float:
        """Return the reward of the step from a place, between -1 and 1."""
        return float(np.tanh(self._draw(place, 2)[0]))

    def _draw(self, place: Moment, kind: int) -> Floats:
        row, episode, step = place
        return np.random.default_rng([self.seed, row, episode + self.first, step, kind]).normal(size=FEATURES)

    def length(self, row: int, episode: int) -> int | None:
        """Return the number of steps of an episode, None if it doesn't end."""
        return self.ends[row][episode].steps if episode < len(self.ends[row]) else None

    def end(self, row: int, episode: int) -> End:
        """Return how an episode ends."""
        return self.ends[row][episode].end

    def walk(self, row: int, steps: int) -> Iterator[Moment]:
        """Yield the places from which an environment takes its first steps."""
        episode = step = 0
        for _ in range(steps):
            yield Moment(row, episode, step)
            step += 1
            if step == self.length(row, episode):
                episode, step = episode + 1, 0

    def find(self, observations: Any) -> list[Moment]:
        """Return the places of observations ``[..., 3]``, in the order of the flattened batch.

        Args:
            observations: observations of the first 128 steps, as float32 numbers that were only copied.

        Raises:
            LookupError: an observation isn't of this script.
        """
        known = {self.observation(place).tobytes(): place for place in self._places(_MOST_STEPS)}
        rows = np.ascontiguousarray(observations, np.float32).reshape(-1, FEATURES)
        missing = [row for row in rows if row.tobytes() not in known]
        if missing:
            raise LookupError(f"The observation {missing[0]} isn't one of the script: it was altered on its way.")
        return [known[row.tobytes()] for row in rows]

    def _places(self, steps: int) -> Iterator[Moment]:
        for row in range(self.num_envs):
            for place in self.walk(row, steps):
                yield place
                if place.step + 1 == self.length(row, place.episode):
                    yield place._replace(step=place.step + 1)  # what the last step returns

    def make(self, row: int) -> ScriptedEnv:
        """Return one of the environments."""
        return ScriptedEnv(self, row)


class ScriptedEnv(gymnasium.Env[NDArray[np.float32], Any]):
    """One environment of a script.

    A reset begins the next episode, or the same one again if it has no steps yet.

    Args:
        script: the script.
        row: index of the environment.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (FEATURES,), np.float32)
    action_space = gymnasium.spaces.Discrete(ACTIONS)
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as declared by Gymnasium

    def __init__(self, script: Script, row: int) -> None:
        self._script, self._place = script, Moment(row, 0, 0)

    @property
    def place(self) -> Moment:
        """Place of the observation returned last."""
        return self._place

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        if self._place.step:
            self._place = Moment(self._place.row, self._place.episode + 1, 0)
        return self._script.observation(self._place), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Take one step."""
        script, place = self._script, self._place
        self._place = place._replace(step=place.step + 1)
        ended = self._place.step == script.length(place.row, place.episode)
        kind = script.end(place.row, place.episode) if ended else None
        observation = script.observation(self._place)
        return observation, script.reward(place), kind == "terminated", kind == "truncated", {}
