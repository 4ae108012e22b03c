"""Environment sources of a run: a Gymnasium id, a function, or an environment object."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import gymnasium as gym
from gymnasium.vector import VectorEnv

from recurl.core.errors import ArgumentTypeError

if TYPE_CHECKING:
    from recurl.envs import EnvBase

    EnvSource: TypeAlias = str | Callable[..., Any] | EnvBase
    """A Gymnasium id, a function that creates a Gymnasium or recurl environment, or a recurl environment."""
else:
    EnvSource = str | Callable[..., Any]  # recurl.envs imports torch, which --help doesn't need

_JAX = "jax:"
_MULTI_AGENT = ("vmas/", "pettingzoo/")
_CALLED = "()"


class NamedEnv(str):
    """Name of a function or object passed as a run's environment, together with the function or object.

    Compares and serializes as a string. The name ends with ``()``, unlike any Gymnasium id.

    Args:
        name: the name.
        source: the function or environment.

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
    """Convert ``source`` to a value of ``RunConfig.env``: a :class:`NamedEnv` for a function or environment.

    Args:
        source: the environment source; anything that can't be an environment is returned unchanged.
        name: name to use; by default that of the function or of the environment's class.

    Raises:
        ArgumentTypeError: if ``source`` is a single Gymnasium environment; a run needs several.

    Example:
        >>> named("CartPole-v1"), named(lambda: None)
        ('CartPole-v1', 'recurl.trainers.env_name.<lambda>()')
    """
    if isinstance(source, str):
        return source
    if isinstance(source, gym.Env | VectorEnv):
        raise ArgumentTypeError(
            f"A run creates its own environments, as it needs several: pass a function that creates one, env=lambda: "
            f"..., got {source}."
        )
    if not is_environment(source) and not callable(source):
        return source
    return NamedEnv(name or f"{_name(source)}{_CALLED}", source)


def source_of(env: Any) -> Callable[..., Any] | EnvBase | None:
    """Return the function or environment behind ``env``, or None for an id."""
    return env.source if isinstance(env, NamedEnv) else None


def is_environment(source: Any) -> bool:
    """Return whether ``source`` is a recurl environment."""
    base = sys.modules.get("recurl.envs.base")  # if it was never imported, no such environment exists
    return base is not None and isinstance(source, base.EnvBase)


def is_name_only(env: Any) -> bool:
    """Return whether ``env`` is only the name of a function or object passed in another process."""
    return not isinstance(env, NamedEnv) and str(env).endswith(_CALLED)


def is_jax(env: Any) -> bool:
    """Return whether ``env`` names an environment written in JAX.

    Example:
        >>> is_jax("jax:gymnax/CartPole-v1"), is_jax("CartPole-v1")
        (True, False)
    """
    return source_of(env) is None and str(env).startswith(_JAX)


def is_multi_agent(env: Any) -> bool:
    """Return whether ``env`` names an environment of several agents.

    Example:
        >>> is_multi_agent("vmas/balance"), is_multi_agent("CartPole-v1")
        (True, False)
    """
    return source_of(env) is None and str(env).startswith(_MULTI_AGENT)


def _name(source: Any) -> str:
    function = getattr(source, "func", source)  # functools.partial
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"
