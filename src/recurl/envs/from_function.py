"""Environments made by a user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import VectorEnv

from recurl.envs.base import EnvBase
from recurl.envs.batched import SerialEnv
from recurl.envs.gym import GymWrapper
from recurl.envs.gym_vector import vector_of
from recurl.envs.gym_wrappers import Wrap, wrapped
from recurl.errors import ArgumentError, ArgumentTypeError
from recurl.keys import ACTION_MASK, NestedKey

__all__ = ["env_from_function"]


def env_from_function(
    create: Callable[..., Any],
    num_envs: int,
    *,
    vectorization_mode: str | None = None,
    wrappers: Sequence[Wrap] = (),
    device: torch.device | str | None = None,
    drop_observations: Sequence[NestedKey] = (),
    action_mask: NestedKey | None = ACTION_MASK,
    **kwargs: Any,
) -> EnvBase:
    """Return ``num_envs`` environments side by side, made by ``create``.

    A function with a parameter ``num_envs`` is called once, with this number. Otherwise one that makes a single
    environment is called ``num_envs`` times; one that makes a batch is called once, and its batch may be of another
    size.

    Args:
        create: makes a ``gymnasium.Env``, a Gymnasium vector environment, or an environment of recurl.
        num_envs: environments side by side.
        vectorization_mode: ``"sync"``, ``"async"`` or None; of single Gymnasium environments only.
        wrappers: wrappers of single Gymnasium environments, the first innermost.
        device: device of the tensors; an environment of recurl has its own.
        drop_observations: see :class:`GymWrapper`; an environment of recurl has its own entries.
        action_mask: likewise.
        **kwargs: further arguments of ``create``.

    Raises:
        ArgumentTypeError: the function makes something else.
        ArgumentError: it makes the same environment twice, or mode or wrappers don't fit what it makes.

    Example:
        >>> env_from_function(lambda: gym.make("CartPole-v1"), 3).reset()["observation"].shape
        torch.Size([3, 4])
    """
    rows = {"num_envs": num_envs} if "num_envs" in _parameters(create) else {}
    make = partial(create, **kwargs)
    first = make(**rows)
    wrap = partial(
        GymWrapper,
        device=device,
        categorical_action_encoding=True,
        drop_observations=drop_observations,
        action_mask=action_mask,
    )
    if isinstance(first, gym.Env):
        return wrap(_vector(first, make, num_envs, vectorization_mode, wrappers, not drop_observations))
    if wrappers or vectorization_mode is not None:
        raise ArgumentError(
            "Wrappers and vectorization are for single Gymnasium environments, but the function makes "
            f"{_kind(first)}: apply them in the function."
        )
    if isinstance(first, VectorEnv):
        return wrap(first)
    if not isinstance(first, EnvBase):
        raise ArgumentTypeError(
            f"The function must make a gymnasium.Env, a gymnasium.vector.VectorEnv or an environment of recurl "
            f"(EnvBase), got {_kind(first)}."
        )
    return first if first.batch_size else _serial(first, make, num_envs)


def _vector(
    first: gym.Env[Any, Any],
    make: Callable[[], Any],
    num_envs: int,
    mode: str | None,
    wrappers: Sequence[Wrap],
    shared_memory: bool,
) -> VectorEnv[Any, Any, Any]:
    if mode == "vector_entry_point":
        raise ArgumentError(
            "A native vector environment needs a Gymnasium id, or a function that makes a "
            "gymnasium.vector.VectorEnv; this one makes single environments: take sync or async."
        )

    def again() -> gym.Env[Any, Any]:
        return wrapped(make(), wrappers)

    if mode == "async":
        first.close()
        return vector_of([again] * num_envs, mode, shared_memory)
    return vector_of([lambda: wrapped(first, wrappers), *[again] * (num_envs - 1)], mode)


def _serial(first: EnvBase, make: Callable[[], EnvBase], num_envs: int) -> EnvBase:
    env = SerialEnv(num_envs, [lambda: first, *[make] * (num_envs - 1)])
    if len({id(single) for single in env.envs}) < num_envs:
        raise ArgumentError("A function that makes an environment must make a new one at every call.")
    return env


def _parameters(create: Callable[..., Any]) -> Sequence[str]:
    try:
        return list(inspect.signature(create).parameters)
    except (TypeError, ValueError):  # some functions written in C have none
        return []


def _kind(made: object) -> str:
    return f"{type(made).__module__}.{type(made).__qualname__}"
