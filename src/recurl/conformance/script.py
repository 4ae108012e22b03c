"""Scripted environments: their observations, rewards and ends are given, whatever the actions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
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
_MORE_EPISODES = 4
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
    """The place of an observation: the environment or agent, its episode, and the step within the episode, from 0."""

    row: int
    episode: int
    step: int


@dataclass(frozen=True)
class Script:
    """Episodes of several environments, or of their agents, which end at given steps.

    All observations are different random numbers, so that an observation tells its place (:meth:`find`).

    Attributes:
        ends: the episodes of each row, which is an environment or an agent; the one after the last of them doesn't end.
        seed: seed of observations and rewards.
        changed: places of observations that are drawn anew: outputs that depend on them change.
        broken: places of observations that are NaN.
        first: number that is added to the indices of episodes: with 1, the first episode has the observations and
            rewards of the second one of a script with 0.
        agents: agents of an environment, which are consecutive rows. One whose episode has ended is absent until those
            of the others have ended too; the environment then begins anew with the next episode of all.

    Raises:
        ValueError: the number of rows isn't a multiple of ``agents``.

    Example:
        >>> script = Script([[terminated(2)], []])
        >>> env = script.make(0)
        >>> first, _ = env.reset()
        >>> second, reward, *ends, _ = env.step(0)
        >>> script.find([first, second])
        [Moment(row=0, episode=0, step=0), Moment(row=0, episode=0, step=1)]
        >>> env.step(1)[2]
        True

        Agent 0 dies after 2 steps and waits; the environment begins anew after 3.

        >>> agents = Script([[terminated(2)], [truncated(3)]], agents=2)
        >>> [(place.episode, place.step) for place in agents.walk(0, steps=5)]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """

    ends: Sequence[Sequence[Episode]]
    seed: int = 0
    changed: frozenset[Moment] = frozenset()
    broken: frozenset[Moment] = frozenset()
    first: int = 0
    agents: int = 1

    def __post_init__(self) -> None:
        if self.num_rows % self.agents:
            raise ValueError(f"{self.num_rows} rows can't be environments of {self.agents} agents.")

    @property
    def num_rows(self) -> int:
        """Number of rows: all agents of all environments."""
        return len(self.ends)

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return self.num_rows // self.agents

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

    def environment_rows(self, row: int) -> range:
        """Return the rows of the environment of a row."""
        first = row - row % self.agents
        return range(first, first + self.agents)

    def timeline(self, row: int, steps: int) -> Iterator[Moment | None]:
        """Yield the place from which a row acts in each of its environment's first steps, None where it is absent."""
        episode = step = 0
        for _ in range(steps):
            length = self.length(row, episode)
            yield Moment(row, episode, step) if length is None or step < length else None
            step += 1
            lengths = [self.length(each, episode) for each in self.environment_rows(row)]
            if all(length is not None and length <= step for length in lengths):
                episode, step = episode + 1, 0

    def walk(self, row: int, steps: int) -> Iterator[Moment]:
        """Yield the places from which a row acts in the first steps of its environment."""
        yield from (place for place in self.timeline(row, steps) if place is not None)

    def find(self, observations: Any) -> list[Moment]:
        """Return the places of observations ``[..., 3]``, in the order of the flattened batch.

        Args:
            observations: observations of the first 128 steps, as float32 numbers that were only copied.

        Raises:
            LookupError: an observation isn't of this script.
        """
        known = {self.observation(place).tobytes(): place for place in self._places(_MOST_STEPS)}
        rows = np.ascontiguousarray(observations, np.float32).reshape(-1, FEATURES)
        for row in rows:
            if row.tobytes() not in known:
                raise LookupError(self._explain(row))
        return [known[row.tobytes()] for row in rows]

    def _explain(self, observation: NDArray[np.float32]) -> str:
        """Say why an observation isn't in the script."""
        for row in range(self.num_rows):
            for episode, step in itertools.product(range(len(self.ends[row]) + _MORE_EPISODES), range(_MOST_STEPS)):
                place = Moment(row, episode, step)
                if self.observation(place).tobytes() == observation.tobytes():
                    length = self.length(row, episode)
                    why = (
                        f"its environment was reset before episode {episode - 1} had ended"
                        if length is None or step <= length
                        else f"the episode ends after {length} steps, but its environment wasn't reset"
                    )
                    return f"Row {row}, episode {episode}, step {step} isn't in the script: {why}."
        return f"The observation {observation} isn't one of the script: it was altered on its way."

    def _places(self, steps: int) -> Iterator[Moment]:
        for row in range(self.num_rows):
            for place in self.walk(row, steps):
                yield place
                if place.step + 1 == self.length(row, place.episode):
                    yield place._replace(step=place.step + 1)  # what the last step returns

    def make(self, row: int) -> ScriptedEnv:
        """Return one of the environments.

        Raises:
            ValueError: environments have several agents.
        """
        if self.agents > 1:
            raise ValueError(f"The environments of this script have {self.agents} agents: call make_agents.")
        return ScriptedEnv(self, row)

    def make_agents(self, env: int) -> ScriptedAgents:
        """Return one of the environments, with its agents."""
        return ScriptedAgents(self, env)


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


class ScriptedAgents:
    """One environment of a script with its agents, by the protocol of PettingZoo's parallel environments.

    A reset begins the next episode of all agents, or the same one again if it has no steps yet. Actions change nothing.

    Args:
        script: the script.
        env: index of the environment.

    Attributes:
        possible_agents: names of the agents, in the order of the script's rows.
        agents: names of those that are present.

    Example:
        >>> env = Script([[terminated(1)], [truncated(2)]], agents=2).make_agents(0)
        >>> observations, _ = env.reset()
        >>> _, _, terminations, truncations, _ = env.step({"agent_0": 0, "agent_1": 0})
        >>> terminations, truncations, env.agents
        ({'agent_0': True, 'agent_1': False}, {'agent_0': False, 'agent_1': False}, ['agent_1'])
    """

    metadata: dict[str, Any] = {"name": "scripted_agents", "render_modes": []}  # noqa: RUF012 - as PettingZoo declares it
    render_mode: str | None = None

    def __init__(self, script: Script, env: int) -> None:
        self._script, self._episode, self._step = script, 0, 0
        rows = script.environment_rows(env * script.agents)
        self._rows = {f"agent_{index}": row for index, row in enumerate(rows)}
        self.possible_agents = list(self._rows)
        self.agents: list[str] = []

    @property
    def unwrapped(self) -> ScriptedAgents:
        """This environment."""
        return self

    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        """Return the space of an agent's observations."""
        return ScriptedEnv.observation_space

    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        """Return the space of an agent's actions."""
        return ScriptedEnv.action_space

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, dict[str, Any]]]:
        """Begin an episode of all agents."""
        if self._step:
            self._episode, self._step = self._episode + 1, 0
        self.agents = list(self.possible_agents)
        return self._observations(), {agent: {} for agent in self.agents}

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[
        dict[str, NDArray[np.float32]], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]
    ]:
        """Take one step of the agents that are present."""
        script, before = self._script, self._places()
        self._step += 1
        ended = {agent: script.length(*place[:2]) == self._step for agent, place in before.items()}
        kinds = {agent: script.end(*place[:2]) if ended[agent] else None for agent, place in before.items()}
        results = (
            self._observations(),
            {agent: script.reward(place) for agent, place in before.items()},
            {agent: kind == "terminated" for agent, kind in kinds.items()},
            {agent: kind == "truncated" for agent, kind in kinds.items()},
            {agent: dict[str, Any]() for agent in before},
        )
        self.agents = [agent for agent in self.agents if not ended[agent]]
        return results

    def _places(self) -> dict[str, Moment]:
        return {agent: Moment(self._rows[agent], self._episode, self._step) for agent in self.agents}

    def _observations(self) -> dict[str, NDArray[np.float32]]:
        return {agent: self._script.observation(place) for agent, place in self._places().items()}

    def render(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
