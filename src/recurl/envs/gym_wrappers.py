"""Gymnasium wrappers that an option names."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import gymnasium as gym

from recurl.errors import ArgumentError, ArgumentTypeError
from recurl.importing import load_object

__all__ = ["NamedWrapper", "Wrap", "wrapped"]

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
        name, opened, rest = text.partition("(")
        self.text = text
        self._options = _options(text, rest) if opened else {}
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


def _options(text: str, rest: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.args
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg}
    except (AssertionError, SyntaxError, ValueError) as error:
        raise ArgumentError(f"--wrapper takes module:Class or module:Class(name=value), got {text!r}.") from error
