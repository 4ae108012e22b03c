"""Gymnasium wrappers that can be named in options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import gymnasium as gym

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.importing import load_object, with_arguments
from recurl.core.ranges import shown

__all__ = ["NamedWrapper", "SelectEntries", "Wrap", "wrapped"]

Wrap: TypeAlias = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]
"""Function that wraps an environment, such as a ``gymnasium.Wrapper`` class."""


class NamedWrapper:
    """Wrapper class given by name, ``module:Class`` or ``module:Class(name=value)``.

    Args:
        text: the name; the values are Python literals.

    Raises:
        ArgumentError: the wrapper doesn't exist, or the text has another format; or (when called) the arguments don't
            match.
        MissingDependencyError: its module is not installed.

    Example:
        >>> NamedWrapper("gymnasium.wrappers:TimeLimit(max_episode_steps=5)")(gym.make("CartPole-v1"))
        <TimeLimit<TimeLimit<OrderEnforcing<PassiveEnvChecker<CartPoleEnv<CartPole-v1>>>>>>
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            name, self._options = with_arguments(text)
        except ValueError as error:
            raise ArgumentError(
                f"--wrapper takes module:Class or module:Class(name=value), got {shown(text)}."
            ) from error
        found = load_object("--wrapper", name, "Class")
        if not (isinstance(found, type) and issubclass(found, gym.Wrapper)):
            kind = "a wrapper of vector environments" if _is_vector(found) else repr(found)
            raise ArgumentError(f"--wrapper {name} must be a subclass of gymnasium.Wrapper, got {kind}.")
        self._kind = found

    def __call__(self, env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
        """Return ``env`` wrapped."""
        try:
            return self._kind(env, **self._options)  # pyright: ignore[reportCallIssue] - a subclass has its own
        except TypeError as error:
            raise ArgumentError(
                f"--wrapper {self.text} can't wrap {env} ({error}): write its arguments as in "
                "'gymnasium.wrappers:TimeLimit(max_episode_steps=200)'."
            ) from error


class SelectEntries(gym.ObservationWrapper[Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Observation wrapper that keeps a range of a vector observation, such as positions without velocities.

    Args:
        env: an environment with a one-dimensional ``Box`` observation.
        start: index of the first entry.
        stop: index after the last entry.

    Raises:
        ArgumentError: the observation isn't a vector, or the range is invalid.

    Example:
        >>> SelectEntries(gym.make("Pendulum-v1"), start=0, stop=2).observation_space.shape
        (2,)
    """

    def __init__(self, env: gym.Env[Any, Any], start: int, stop: int) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, start=start, stop=stop)
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ArgumentError(f"SelectEntries needs a vector observation, a one-dimensional Box, got {space}.")
        if not 0 <= start < stop <= space.shape[0]:
            raise ArgumentError(
                f"start and stop must select some of the {space.shape[0]} entries of the observation, 0 <= start < "
                f"stop <= {space.shape[0]}, got {start} and {stop}."
            )
        self._kept = slice(start, stop)
        low, high = space.low[self._kept], space.high[self._kept]
        self.observation_space = gym.spaces.Box(low, high, dtype=cast(Any, space.dtype))

    def observation(self, observation: Any) -> Any:
        """Return the selected entries."""
        return observation[self._kept]


class FirstActions(gym.ActionWrapper[Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Action wrapper that keeps the first actions of a ``Discrete`` space, such as the turns and moves of a MiniGrid.

    Args:
        env: an environment with ``Discrete`` actions.
        count: number of actions to keep.

    Raises:
        ArgumentError: the actions aren't ``Discrete``, or there are fewer of them.

    Example:
        >>> FirstActions(gym.make("Acrobot-v1"), count=2).action_space
        Discrete(2)
    """

    def __init__(self, env: gym.Env[Any, Any], count: int) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, count=count)
        super().__init__(env)
        space = env.action_space
        if not isinstance(space, gym.spaces.Discrete):
            raise ArgumentError(f"FirstActions needs a Discrete action space, got {space}.")
        if not 1 <= count <= space.n:
            raise ArgumentError(f"count must be between 1 and {space.n}, the number of actions, got {count}.")
        self.action_space = gym.spaces.Discrete(count, start=int(space.start))

    def action(self, action: Any) -> Any:
        """Return the action unchanged."""
        return action


def wrapped(env: gym.Env[Any, Any], wrappers: Sequence[Wrap]) -> gym.Env[Any, Any]:
    """Return ``env`` wrapped in ``wrappers``, the first innermost.

    Raises:
        ArgumentTypeError: a wrapper doesn't return an environment.
    """
    for wrap in wrappers:
        env = wrap(env)
        if not isinstance(env, gym.Env):  # pyright: ignore[reportUnnecessaryIsInstance] - users
            raise ArgumentTypeError(f"A wrapper must return a gymnasium.Env, got {env!r} from {wrap!r}.")
    return env


def _is_vector(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, gym.vector.VectorWrapper)
