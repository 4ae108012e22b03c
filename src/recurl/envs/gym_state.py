"""Saving and restoring the state of running Gymnasium environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from recurl.envs.state_graph import GraphReader, GraphWriter, has_own_state
from recurl.envs.state_plain import MAX_BYTES
from recurl.errors import ArgumentError, UnfitStateError

__all__ = ["Gym", "SavedState", "cores", "creator_of", "implements_state", "restore", "save"]

Gym: TypeAlias = gym.Env[Any, Any] | VectorEnv[Any, Any, Any]

_KNOWN_WRAPPERS = (gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker, gym.wrappers.TimeLimit)


class SavedState(gym.Wrapper[Any, Any, Any, Any]):
    """Outermost wrapper of an environment in a process of Gymnasium, for its state to be read and written."""

    @property
    def saved_state(self) -> tuple[str, bytes]:
        """The state of the environment inside."""
        state = save(self.env)
        return state["objects"], state["bytes"].numpy().tobytes()

    @saved_state.setter
    def saved_state(self, state: tuple[str, bytes]) -> None:
        restore(self.env, _state(*state))


def _state(objects: str, data: bytes) -> dict[str, Any]:
    return {"objects": objects, "bytes": torch.frombuffer(bytearray(data), dtype=torch.uint8)}


def implements_state(env: Any) -> bool:
    """Return whether an environment has ``get_state()`` and ``set_state(state)``, and no wrapper but Gymnasium's."""
    if isinstance(env, SyncVectorEnv):
        return all(implements_state(child) for child in env.envs)
    while isinstance(env, _KNOWN_WRAPPERS):
        env = env.env
    return has_own_state(env)


def save(env: Any) -> dict[str, Any]:
    """Return the state of ``env`` and its wrappers as tensors and plain Python values.

    Raises:
        UnsavableError: something in it can't be saved.
    """
    if isinstance(env, AsyncVectorEnv):
        return {"envs": [_state(*state) for state in env.get_attr("saved_state")]}
    return GraphWriter(MAX_BYTES * getattr(env, "num_envs", 1)).written(env)


def restore(env: Any, state: dict[str, Any]) -> None:
    """Restore a state returned by :func:`save` on ``env``, which was constructed the same way.

    Raises:
        UnfitStateError: the state is of another environment, or holds what this one can't take. The environment must be
            reset then, as some of the state may be restored.
    """
    env.reset()  # what an environment makes at its first reset is there then
    try:
        if isinstance(env, AsyncVectorEnv):
            states: Sequence[dict[str, Any]] = state["envs"]
            env.set_attr("saved_state", [(each["objects"], each["bytes"].numpy().tobytes()) for each in states])
        elif "objects" in state:
            GraphReader(state).restore(env)
        else:
            _restore_legacy(env, state)
    except ArgumentError as error:
        raise UnfitStateError(str(error)) from error


def _restore_legacy(env: Any, state: dict[str, Any]) -> None:
    """Restore a state as earlier versions saved it: that of ``get_state()``, and the steps that limits had counted."""
    if isinstance(env, SyncVectorEnv):
        for child, saved in zip(env.envs, state["envs"], strict=True):
            child.reset()
            _restore_legacy(child, saved)
        return
    if not has_own_state(env.unwrapped):
        raise ArgumentError(f"The state is of another environment than {env}.")
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


def _to_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu().numpy().copy()
    if isinstance(value, dict):
        return {key: _to_arrays(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_arrays(child) for child in value)
    return value


def creator_of(env: Gym) -> Callable[[], Gym] | None:
    """Return what makes such an environment anew, None where that isn't known."""
    if isinstance(env, SyncVectorEnv):
        return partial(SyncVectorEnv, list(env.env_fns)[:2], autoreset_mode=env.autoreset_mode)
    spec: Any = env.spec
    return None if spec is None or isinstance(env, VectorEnv) else partial(gym.make, spec)


def cores(env: Gym) -> list[object]:
    """Return the environments without their wrappers."""
    if isinstance(env, SyncVectorEnv):
        return [core for child in env.envs for core in cores(child)]
    return [env.unwrapped]
