"""Gymnasium wrappers that an option names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import gymnasium as gym

from recurl.errors import ArgumentError, ArgumentTypeError
from recurl.importing import load_object, with_arguments
from recurl.ranges import shown

__all__ = ["NamedWrapper", "SelectEntries", "Wrap", "wrapped"]

Wrap: TypeAlias = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]
"""A function from an environment to one around it, such as a ``gymnasium.Wrapper`` class."""


class NamedWrapper:
    """A wrapper class by its name, ``module:Class`` or ``module:Class(name=value)``.

    Args:
        text: the name; the values are Python literals.

    Raises:
        ArgumentError: there is no such wrapper, or it is written otherwise; or (when called) it takes other arguments.
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
    """Shows some entries of a vector observation only: the positions of a body without its velocities, for instance.

    Args:
        env: an environment that observes a ``Box`` of one dimension.
        start: the first entry.
        stop: the entry after the last.

    Raises:
        ArgumentError: the observation is another one, or there are no such entries.

    Example:
        >>> SelectEntries(gym.make("Pendulum-v1"), start=0, stop=2).observation_space.shape
        (2,)
    """

    def __init__(self, env: gym.Env[Any, Any], start: int, stop: int) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, start=start, stop=stop)
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ArgumentError(f"SelectEntries needs a vector as observation, a Box of one dimension, got {space}.")
        if not 0 <= start < stop <= space.shape[0]:
            raise ArgumentError(
                f"start and stop must choose some of the {space.shape[0]} entries of the observation, 0 <= start < "
                f"stop <= {space.shape[0]}, got {start} and {stop}."
            )
        self._kept = slice(start, stop)
        low, high = space.low[self._kept], space.high[self._kept]
        self.observation_space = gym.spaces.Box(low, high, dtype=cast(Any, space.dtype))

    def observation(self, observation: Any) -> Any:
        """Return the entries."""
        return observation[self._kept]


class FirstActions(gym.ActionWrapper[Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Offers the first actions of a ``Discrete`` space only: the turns and steps of a MiniGrid, for instance.

    Args:
        env: an environment with ``Discrete`` actions.
        count: how many of them are offered.

    Raises:
        ArgumentError: the actions are others, or there are fewer.

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
            raise ArgumentError(f"count must lie between 1 and the {space.n} actions that there are, got {count}.")
        self.action_space = gym.spaces.Discrete(count, start=int(space.start))

    def action(self, action: Any) -> Any:
        """Return the action, which is the same."""
        return action


def wrapped(env: gym.Env[Any, Any], wrappers: Sequence[Wrap]) -> gym.Env[Any, Any]:
    """Return ``env`` in ``wrappers``, the first innermost.

    Raises:
        ArgumentTypeError: a wrapper returns something else.
    """
    for wrap in wrappers:
        env = wrap(env)
        if not isinstance(env, gym.Env):  # pyright: ignore[reportUnnecessaryIsInstance] - users
            raise ArgumentTypeError(f"A wrapper must return a gymnasium.Env, got {env!r} from {wrap!r}.")
    return env


def _is_vector(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, gym.vector.VectorWrapper)
