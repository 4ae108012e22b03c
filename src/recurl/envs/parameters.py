"""Parameters of environments that may change during training: numbers, set by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, VectorEnv, VectorWrapper

from recurl.core.errors import ArgumentError
from recurl.core.messages import nearest

__all__ = ["Parameter", "checked_parameters", "set_parameters"]

Parameter: TypeAlias = float | int | bool | Sequence["Parameter"]
"""Value of a parameter: a number, or a list or tuple of such values."""
_METHOD = "set_parameters"
_SPACES = ("observation_space", "action_space", "single_observation_space", "single_action_space", "num_envs")


def checked_parameters(values: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the values of parameters by name, as plain numbers, lists and tuples.

    Raises:
        ArgumentError: a name isn't that of a public attribute, or a value is neither a finite number nor a list or
            tuple of them.

    Example:
        >>> checked_parameters({"mass": (0.5, 1.5), "friction": 2})
        {'mass': (0.5, 1.5), 'friction': 2}
    """
    wrong = next((name for name in values if not name.isidentifier() or name.startswith("_") or name in _SPACES), None)
    if wrong is not None:
        raise ArgumentError(f"A parameter must be a public attribute other than {', '.join(_SPACES)}, got {wrong!r}.")
    return {name: _plain(name, value) for name, value in values.items()}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        parts = cast("list[Any]", value)
        return type(value)(_plain(name, part) for part in parts)
    found = value.item() if getattr(value, "shape", None) == () else value  # of NumPy and torch
    if not isinstance(found, int | float) or not math.isfinite(found):
        raise ArgumentError(
            f"The parameter {name} must be a finite number, or a list or tuple of them, got {value!r:.80}."
        )
    return found


def set_parameters(env: Any, values: Mapping[str, Parameter]) -> None:
    """Set the parameters of an environment or simulator that isn't one of recurl.

    If it, or a wrapper or environment inside, has a method ``set_parameters(values)``, that gets them. Otherwise they
    are attributes. In a vector environment, those of each single environment.

    Args:
        env: a Gymnasium environment or vector environment, or a simulator.
        values: values by name.

    Raises:
        ArgumentError: there is no such attribute, or it is a method.
    """
    targets = _targets(env)
    for name in values:
        _check(targets[0], name)
    for target in targets:
        if _has(target, _METHOD):
            _get(target, _METHOD)(dict(values))
            continue
        for name, value in values.items():
            _set(target, name, value)


def _targets(env: Any) -> list[Any]:
    """Return the environments that have the attributes."""
    if isinstance(env, VectorWrapper):
        return _targets(cast(Any, env).env)
    inner = getattr(env, "envs", getattr(env, "rows", None)) if isinstance(env, VectorEnv) else None
    return [env] if inner is None else [target for row in inner for target in _targets(row)]


def _check(target: Any, name: str) -> None:
    if _has(target, _METHOD):
        return
    if not _has(target, name):
        raise ArgumentError(
            f"The parameter {name} can't be set, as {target} has neither such an attribute nor a method {_METHOD}."
            f"{nearest(name, dir(_unwrapped(target)))}"
        )
    if not isinstance(target, AsyncVectorEnv) and callable(_get(target, name)):
        raise ArgumentError(f"The parameter {name} can't be set, as it is a method of {target}.")


def _has(target: Any, name: str) -> bool:
    if isinstance(target, AsyncVectorEnv):
        return all(target.call("has_wrapper_attr", name))
    if isinstance(target, gym.Env):
        return cast(Any, target).has_wrapper_attr(name)
    return hasattr(target, name) or hasattr(_unwrapped(target), name)


def _get(target: Any, name: str) -> Any:
    if isinstance(target, AsyncVectorEnv):
        return partial(target.call, name)
    if isinstance(target, gym.Env):
        return cast(Any, target).get_wrapper_attr(name)
    return getattr(target if hasattr(target, name) else _unwrapped(target), name)


def _set(target: Any, name: str, value: Parameter) -> None:
    if isinstance(target, AsyncVectorEnv):
        target.set_attr(name, [value] * target.num_envs)
    elif isinstance(target, gym.Env):
        cast(Any, target).set_wrapper_attr(name, value)
    else:
        setattr(target if hasattr(target, name) else _unwrapped(target), name, value)


def _unwrapped(target: Any) -> Any:
    return getattr(target, "unwrapped", target)
