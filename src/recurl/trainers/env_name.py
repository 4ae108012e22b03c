"""Environments that are given to a run in Python: an id, a function, or an object."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import gymnasium as gym
from gymnasium.vector import VectorEnv

from recurl.errors import ArgumentTypeError

if TYPE_CHECKING:
    from recurl.envs import EnvBase

    EnvSource: TypeAlias = str | Callable[..., Any] | EnvBase
    """A Gymnasium id, a function that makes an environment (of Gymnasium or recurl), or an environment of recurl."""
else:
    EnvSource = str | Callable[..., Any]  # recurl.envs imports torch, which the help of the options doesn't need

_CALLED = "()"


class NamedEnv(str):
    """Name of a function or an object that was given as a run's environment, and the thing itself.

    It is compared and written as a text. It ends with ``()``, as no id of Gymnasium does.

    Args:
        name: the name.
        source: the function or the environment.

    Example:
        >>> NamedEnv("module.make()", dict) == "module.make()"
        True
    """

    source: Callable[..., Any] | EnvBase

    def __new__(cls, name: str, source: Callable[..., Any] | EnvBase) -> Self:  # noqa: D102 - a constructor
        made = super().__new__(cls, name)
        made.source = source
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (str(self), self.source)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def named(source: Any, name: str | None = None) -> Any:
    """Return what ``RunConfig.env`` holds for ``source``: a :class:`NamedEnv` for a function or an environment.

    Args:
        source: what was given; anything that can't be an environment is returned unchanged.
        name: the name to keep; by default that of the function, or of the environment's class.

    Raises:
        ArgumentTypeError: ``source`` is a Gymnasium environment, of which a run would need several.

    Example:
        >>> named("CartPole-v1"), named(lambda: None)
        ('CartPole-v1', 'recurl.trainers.env_name.<lambda>()')
    """
    if isinstance(source, str):
        return source
    if isinstance(source, gym.Env | VectorEnv):
        raise ArgumentTypeError(
            f"A run makes its environments itself, as it needs several: give a function that makes one, env=lambda: "
            f"..., got {source}."
        )
    if not is_environment(source) and not callable(source):
        return source
    return NamedEnv(name or f"{_name(source)}{_CALLED}", source)


def source_of(env: Any) -> Callable[..., Any] | EnvBase | None:
    """Return the function or the environment that was given, or None for an id."""
    return env.source if isinstance(env, NamedEnv) else None


def is_environment(source: Any) -> bool:
    """Return whether ``source`` is an environment of recurl."""
    base = sys.modules.get("recurl.envs.base")  # without it there is no such environment
    return base is not None and isinstance(source, base.EnvBase)


def is_name_only(env: Any) -> bool:
    """Return whether ``env`` is the name of something that was given to another process and has to be given again."""
    return not isinstance(env, NamedEnv) and str(env).endswith(_CALLED)


def _name(source: Any) -> str:
    function = getattr(source, "func", source)  # of a functools.partial
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"
