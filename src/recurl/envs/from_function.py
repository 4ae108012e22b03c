"""Environments created by a user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.keys import ACTION_MASK, NestedKey
from recurl.envs.base import EnvBase
from recurl.envs.batched import SerialEnv
from recurl.envs.gym import GymWrapper
from recurl.envs.gym_vector import vector_of
from recurl.envs.gym_wrappers import Wrap, wrapped
from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
from recurl.envs.tasks.dynamics import Dynamics
from recurl.envs.tensor_env import TensorEnv
from recurl.envs.trials import TrialDynamics, Trials

__all__ = ["env_from_function"]


def env_from_function(
    create: Callable[..., Any],
    num_envs: int | None,
    *,
    vectorization_mode: str | None = None,
    wrappers: Sequence[Wrap] = (),
    device: torch.device | str | None = None,
    drop_observations: Sequence[NestedKey] = (),
    action_mask: NestedKey | None = ACTION_MASK,
    render_mode: str | None = None,
    trial_episodes: int | None = None,
    **kwargs: Any,
) -> EnvBase:
    """Return a batch of ``num_envs`` environments created by ``create``.

    A function with a parameter ``num_envs`` is called once, with this number. Otherwise, a function that creates a
    single environment is called ``num_envs`` times. A function that creates a batch is called once, and its batch may
    have another size. A task's :class:`~recurl.envs.tasks.Dynamics` are stepped by NumPy, or by torch on a device.

    Args:
        create: function that creates a ``gymnasium.Env``, a Gymnasium vector environment, an environment of recurl, or
            ``Dynamics``.
        num_envs: number of environments; None for a single one, with batch size ``[]`` if the function can create it.
        vectorization_mode: ``"sync"``, ``"async"`` or None for single Gymnasium environments; for ``Dynamics``,
            ``"vector_entry_point"`` (NumPy), ``"device"`` (torch), or None, which is NumPy on the CPU.
        wrappers: wrappers of single Gymnasium environments, the first innermost.
        device: device of the tensors; an environment of recurl has its own.
        drop_observations: see :class:`GymWrapper`; not supported for environments of recurl.
        action_mask: likewise, nor for tasks on a device.
        render_mode: render mode of a single environment, an argument of ``create``.
        trial_episodes: join as many episodes into a trial; for single Gymnasium environments, outside of ``wrappers``,
            and for ``Dynamics``.
        **kwargs: further arguments of ``create``.

    Raises:
        ArgumentTypeError: the function creates an object of another type.
        ArgumentError: the function creates the same environment twice, or one with the wrong render mode, or the
            options don't fit the created object.

    Example:
        >>> env_from_function(lambda: gym.make("CartPole-v1"), 3).reset()["observation"].shape
        torch.Size([3, 4])
    """
    rows = {"num_envs": num_envs or 1} if "num_envs" in _parameters(create) else {}
    shown = {"render_mode": render_mode} if render_mode is not None and _takes_render_mode(create) else {}
    make = partial(create, **kwargs, **shown)
    first = make(**rows)
    if trial_episodes is not None:
        first, wrappers = _in_trials(first, wrappers, trial_episodes)
    wrap = partial(
        GymWrapper,
        device=device,
        categorical_action_encoding=True,
        drop_observations=drop_observations,
        action_mask=action_mask,
    )
    make_wrapped = partial(_make_wrapped, partial(make, **dict.fromkeys(rows, 1)), wrappers)
    if isinstance(first, gym.Env) and num_envs is None:
        return wrap(_check_render_mode(wrapped(first, wrappers), render_mode), create_env=make_wrapped)
    if isinstance(first, gym.Env):
        vector = _vector(first, make, num_envs or 1, vectorization_mode, wrappers, not drop_observations)
        return wrap(vector, create_env=partial(vector_of, [make_wrapped, make_wrapped][: vector.num_envs], None))
    tasks = (None, "vector_entry_point", "device") if isinstance(first, Dynamics) else (None,)
    if wrappers or vectorization_mode not in tasks:
        raise ArgumentError(
            "Wrappers and vectorization are for single Gymnasium environments, but the function creates "
            f"{_type_name(first)}: apply them in the function."
        )
    if isinstance(first, VectorEnv):
        return wrap(first, create_env=partial(make, **rows))
    if isinstance(first, Dynamics) and not (num_envs and _is_on_device(vectorization_mode, device)):
        return wrap(_task_env(first, num_envs, render_mode))
    dropped = drop_observations and not isinstance(first, Dynamics)
    if dropped or action_mask not in (None, ACTION_MASK):
        raise ArgumentError(
            f"{'Dropped observations are' if dropped else 'Action masks are'} for Gymnasium environments, but the "
            f"function creates {_type_name(first)}, which has its own entries: leave "
            f"{'them out, or drop them in the function' if dropped else 'them out'}."
        )
    if isinstance(first, Dynamics):
        return TensorEnv(
            first,
            num_envs or 1,
            device=device,
            categorical_action_encoding=True,
            drop_observations=drop_observations,
        )
    return _recurl_env(first, make, num_envs)


def _in_trials(first: Any, wrappers: Sequence[Wrap], episodes: int) -> tuple[Any, Sequence[Wrap]]:
    if isinstance(first, Dynamics):
        return TrialDynamics(first, episodes), wrappers
    if isinstance(first, gym.Env):
        return first, [*wrappers, partial(Trials, episodes=episodes)]
    raise ArgumentError(
        f"Trials are for single Gymnasium environments and Dynamics, but the function creates {_type_name(first)}: let "
        "the environment join its episodes itself."
    )


def _make_wrapped(make: Callable[[], gym.Env[Any, Any]], wrappers: Sequence[Wrap]) -> gym.Env[Any, Any]:
    return wrapped(make(), wrappers)


def _recurl_env(first: object, make: Callable[[], Any], num_envs: int | None) -> EnvBase:
    if not isinstance(first, EnvBase):
        raise ArgumentTypeError(
            f"The function must create a gymnasium.Env, a gymnasium.vector.VectorEnv, an environment of recurl "
            f"(EnvBase), or a task's Dynamics, got {_type_name(first)}."
        )
    return first if first.batch_size or num_envs is None else _serial(first, make, num_envs)


def _is_on_device(mode: str | None, device: torch.device | str | None) -> bool:
    return mode == "device" or (mode is None and torch.device(device or "cpu").type != "cpu")


def _task_env(dynamics: Dynamics, num_envs: int | None, render_mode: str | None) -> TaskVectorEnv | TaskEnv:
    rows = TaskVectorEnv(dynamics, num_envs or 1, AutoresetMode.DISABLED)
    return rows if num_envs else TaskEnv(rows, render_mode)


def _check_render_mode(env: gym.Env[Any, Any], render_mode: str | None) -> gym.Env[Any, Any]:
    """Return ``env``; raise if it doesn't have the requested render mode."""
    if render_mode is not None and env.render_mode != render_mode:
        raise ArgumentError(
            f"The environment must have the render mode {render_mode!r} to be shown, but the function creates one with "
            f"{env.render_mode!r}: give the function a parameter render_mode and pass it on."
        )
    return env


def _vector(
    first: gym.Env[Any, Any],
    make: Callable[[], Any],
    num_envs: int,
    mode: str | None,
    wrappers: Sequence[Wrap],
    shared_memory: bool,
) -> VectorEnv[Any, Any, Any]:
    if mode not in (None, "sync", "async"):
        raise ArgumentError(
            "A native vector environment needs a Gymnasium id, or a function that creates a gymnasium.vector.VectorEnv "
            "or Dynamics; one on the device needs Dynamics. This function creates single environments: use sync or "
            "async."
        )

    make_each = partial(_make_wrapped, make, wrappers)
    if mode == "async":
        first.close()
        return vector_of([make_each] * num_envs, mode, shared_memory)
    return vector_of([lambda: wrapped(first, wrappers), *[make_each] * (num_envs - 1)], mode)


def _serial(first: EnvBase, make: Callable[[], EnvBase], num_envs: int) -> EnvBase:
    env = SerialEnv(num_envs, [lambda: first, *[make] * (num_envs - 1)])
    if len({id(single) for single in env.envs}) < num_envs:
        raise ArgumentError("A function that creates an environment must create a new one at every call.")
    return env


def _parameters(create: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(create).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return {}


def _takes_render_mode(create: Callable[..., Any]) -> bool:
    parameters = _parameters(create)
    return "render_mode" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _type_name(made: object) -> str:
    return f"{type(made).__module__}.{type(made).__qualname__}"
