"""Saving and restoring the state of running Gymnasium environments."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv

__all__ = ["can_save", "restore", "save"]

_STATELESS = (gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)


def can_save(env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> bool:
    """Return whether :func:`save` covers the whole state of ``env`` and its wrappers.

    The environment itself must have ``get_state()`` and ``set_state(state)``, random generator included; only the
    wrappers that ``gymnasium.make`` adds are supported. A ``SyncVectorEnv`` is supported if its environments are.
    """
    if isinstance(env, SyncVectorEnv):
        return all(can_save(child) for child in env.envs)
    while isinstance(env, gym.Wrapper) and isinstance(env, (*_STATELESS, gym.wrappers.TimeLimit)):
        env = env.env
    return env is env.unwrapped and hasattr(env, "get_state") and hasattr(env, "set_state")


def save(env: Any) -> dict[str, Any]:
    """Return the state of ``env`` as tensors and plain Python values (see :func:`can_save`)."""
    if isinstance(env, SyncVectorEnv):
        return {"envs": [save(child) for child in env.envs]}
    return {"env": _to_tensors(env.unwrapped.get_state()), "elapsed": [limit._elapsed_steps for limit in _limits(env)]}


def restore(env: Any, state: dict[str, Any]) -> None:
    """Restore a state returned by :func:`save` on ``env``, which was constructed the same way."""
    if isinstance(env, SyncVectorEnv):
        env.reset()
        for child, saved in zip(env.envs, state["envs"], strict=True):
            restore(child, saved)
        return
    env.reset()
    env.unwrapped.set_state(_to_arrays(state["env"]))
    for limit, elapsed in zip(_limits(env), state["elapsed"], strict=True):
        limit._elapsed_steps = elapsed


def _limits(env: Any) -> list[Any]:
    limits: list[Any] = []
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.TimeLimit):
            limits.append(env)
        env = env.env
    return limits


def _to_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _to_tensors(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_tensors(child) for child in value)
    return value


def _to_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu().numpy().copy()
    if isinstance(value, dict):
        return {key: _to_arrays(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_arrays(child) for child in value)
    return value
