"""Trials of several episodes, over which a policy's memory is kept (RL squared)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from recurl.core.errors import ArgumentError
from recurl.envs.tasks.base import TaskEnv
from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace

__all__ = ["EPISODE_BEGINS", "TRIAL_EPISODE", "TrialDynamics", "Trials"]

EPISODE_BEGINS = "episode_begins"
"""Name of the flag, 1 where an episode begins, in an observation with several entries."""
TRIAL_EPISODE = "trial_episode"
"""Name of the reset option that an environment gets with the second and later episodes of a trial: their number."""
_EPISODE, _BEGUN = "trial:episode", "trial:begun"


class Trials(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Wrapper that joins consecutive episodes into trials, each of which is one episode for an agent.

    The memory of a policy is thus kept over the episodes of a trial, as are the previous action and reward, and returns
    are discounted over all of it: an early episode is worth what it teaches about the later ones. Within a trial, the
    step that ends an episode returns the first observation of the next one. The end of the last episode terminates the
    trial.

    A flag in the observation is 1 where an episode begins: one more number of a vector, otherwise an entry
    ``"episode_begins"`` (beside ``"observation"``, unless the space is a ``Dict``).

    The environment decides what a trial has in common, such as the place of a goal: it begins anew with every plain
    reset. The further episodes of a trial begin with ``reset(options={"trial_episode": number})``, from 1.

    Args:
        env: the environment, with episodes that end.
        episodes: number of episodes of a trial.

    Source: Duan et al., "RL^2: Fast reinforcement learning via slow reinforcement learning" (2016), section 2.

    Raises:
        ArgumentError: ``episodes`` is below 1; the observations have an entry ``"episode_begins"`` already; or the
            environment is a task, whose trials are :class:`TrialDynamics`.

    Example:
        >>> import gymnasium as gym
        >>> env = Trials(gym.make("CartPole-v1", max_episode_steps=1), episodes=2)
        >>> env.reset()[0][-1], [tuple(env.step(0)[2:4]) for _ in range(2)]
        (np.float32(1.0), [(False, False), (True, False)])
    """

    def __init__(self, env: gym.Env[Any, Any], episodes: int) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, episodes=episodes)
        super().__init__(env)
        self.episodes = check_count("episodes", episodes, minimum=1)
        if isinstance(env.unwrapped, TaskEnv):
            raise ArgumentError(
                f"{env.unwrapped} is a task, whose trials are TrialDynamics: leave out wrappers and dropped "
                "observations (--wrapper, --drop-observations), and sync or async vectorization."
            )
        self._number = 0
        space = env.observation_space
        flag = Box(0.0, 1.0, (1,), np.float32)
        self._is_vector = _is_vector(space)
        if self._is_vector:
            self.observation_space = _longer(space)
        elif isinstance(space, Dict):
            if EPISODE_BEGINS in space.spaces:
                raise ArgumentError(f"The observations of {env} have an entry {EPISODE_BEGINS!r} already: rename it.")
            self.observation_space = Dict({**space.spaces, EPISODE_BEGINS: flag})
        else:
            self.observation_space = Dict({"observation": space, EPISODE_BEGINS: flag})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a trial."""
        self._number = 0
        observation, info = self.env.reset(seed=seed, options=options)
        return self._marked(observation, 1), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Play one step, and begin the next episode of the trial if one has ended."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            return self._marked(observation, 0), reward, False, False, info
        self._number += 1
        if self._number == self.episodes:
            return self._marked(observation, 0), reward, True, False, info
        observation, info = self.env.reset(options={TRIAL_EPISODE: self._number})
        return self._marked(observation, 1), reward, False, False, info

    def _marked(self, observation: Any, begins: int) -> Any:
        if self._is_vector:
            return np.append(observation, np.asarray(begins, dtype=np.asarray(observation).dtype))
        flag = np.full(1, begins, dtype=np.float32)
        if isinstance(self.env.observation_space, Dict):
            return {**observation, EPISODE_BEGINS: flag}
        return {"observation": observation, EPISODE_BEGINS: flag}


class TrialDynamics(Dynamics):
    """Dynamics whose episodes are trials of several episodes of a task; see :class:`Trials`.

    The initial states of all episodes of a trial are drawn when it begins, those of the second and later ones by the
    task's :meth:`~recurl.envs.tasks.Dynamics.begin_again`. An episode also ends at the task's step limit.

    Args:
        dynamics: the task, whose observations are vectors.
        episodes: number of episodes of a trial.

    Raises:
        ArgumentError: ``episodes`` is below 1, or the observations aren't vectors.
    """

    def __init__(self, dynamics: Dynamics, episodes: int) -> None:
        self.episodes = check_count("episodes", episodes, minimum=1)
        if not _is_vector(dynamics.observation_space):
            raise ArgumentError(
                f"Trials of a task need vectors as observations, to which a flag is added, got "
                f"{dynamics.observation_space} from {type(dynamics).__name__}."
            )
        super().__init__(
            observation_space=_longer(dynamics.observation_space),
            actions=_arguments(dynamics.action_space),
            step_limit=episodes * dynamics.step_limit,
        )
        self.dynamics = dynamics
        self.parameters = dynamics.parameters

    def get_parameters(self) -> dict[str, Any]:
        """Return the present values of the task's parameters, by name."""
        return self.dynamics.get_parameters()

    def with_parameters(self, values: Mapping[str, Any]) -> Self:
        """Return a copy whose task has other values of parameters."""
        found = copy.copy(self)
        found.dynamics = self.dynamics.with_parameters(values)
        return found

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Return the state at the beginning of a trial, with the initial states of its other episodes."""
        first = dict(self.dynamics.begin(xp, draw))
        state = {**first, _EPISODE: draw.integers(1), _BEGUN: draw.integers(1)}  # zeros
        before = first
        for number in range(1, self.episodes):
            before = self.dynamics.begin_again(xp, draw, before)
            state |= {_later(number, name): value for name, value in before.items()}
        return state

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Return the state after a step, in the next episode where one has ended, and where the trial is over."""
        own, taken, number = self._own(state), steps - state[_BEGUN], state[_EPISODE]
        after, reward, terminated = self.dynamics.advance(xp, own, taken, actions)
        ended = terminated | (taken + 1 >= self.dynamics.step_limit)
        over = ended & (number + 1 >= self.episodes)
        again = ended & ~over
        running = dict(after)
        for later in range(1, self.episodes):
            here = again & (number + 1 == later)
            running = {name: xp.where(here, state[_later(later, name)], value) for name, value in running.items()}
        kept = {name: value for name, value in state.items() if name not in own}
        kept[_EPISODE] = xp.where(again, number + 1, number)
        kept[_BEGUN] = xp.where(again, steps + 1, state[_BEGUN])
        return {**running, **kept}, reward, over

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the task's observations, followed by 1 where an episode begins, and 0 elsewhere."""
        seen = self.dynamics.observe(xp, self._own(state), steps - state[_BEGUN])
        return xp.concat([seen, xp.astype((steps == state[_BEGUN])[:, None], seen.dtype)], 1)

    def _own(self, state: State) -> State:
        return {name: value for name, value in state.items() if not name.startswith("trial:")}


def _later(number: int, name: str) -> str:
    return f"trial:{number}:{name}"


def _is_vector(space: gym.Space[Any]) -> bool:
    return isinstance(space, Box | MultiBinary) and len(space.shape or ()) == 1


def _longer(space: gym.Space[Any]) -> Any:
    """Return a space of vectors with one more number, 0 or 1."""
    if isinstance(space, MultiBinary):
        return MultiBinary(space.shape[0] + 1)
    assert isinstance(space, Box)
    low, high = (np.append(ends, np.asarray(end, space.dtype)) for ends, end in ((space.low, 0), (space.high, 1)))
    return Box(low, high, dtype=space.dtype)  # type: ignore[arg-type] # NumPy's dtypes


def _arguments(space: Discrete | MultiDiscrete | Box) -> int | Sequence[int] | Box:
    """Return the argument of ``Dynamics`` for an action space."""
    if isinstance(space, Discrete):
        return int(space.n)
    return [int(count) for count in space.nvec] if isinstance(space, MultiDiscrete) else space
