"""Saving and restoring the state of running Gymnasium environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from recurl.core.errors import ArgumentError, UnfitStateError
from recurl.envs.gymnasium_compat import set_elapsed_steps

__all__ = ["Gym", "SavedState", "cores", "creator_of", "implements_state", "restore", "save"]

Gym: TypeAlias = gym.Env[Any, Any] | VectorEnv[Any, Any, Any]

_KNOWN_WRAPPERS = (gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker, gym.wrappers.TimeLimit)


class SavedState(gym.Wrapper[Any, Any, Any, Any]):
    """Outermost wrapper of an environment in a Gymnasium worker process; gives access to the environment's state."""

    @property
    def saved_state(self) -> tuple[str, bytes]:
        """State of the wrapped environment."""
        state = save(self.env)
        return state["objects"], state["bytes"].numpy().tobytes()

    @saved_state.setter
    def saved_state(self, state: tuple[str, bytes]) -> None:
        restore(self.env, _state(*state))


def _state(objects: str, data: bytes) -> dict[str, Any]:
    return {"objects": objects, "bytes": torch.frombuffer(bytearray(data), dtype=torch.uint8)}


def implements_state(env: Any) -> bool:
    """Return whether an environment without custom wrappers has ``get_state()`` and ``set_state(state)``."""
    from recurl.envs.state_graph import has_own_state  # noqa: PLC0415 - imported where it is used

    if isinstance(env, SyncVectorEnv):
        return all(implements_state(child) for child in env.envs)
    while isinstance(env, _KNOWN_WRAPPERS):
        env = env.env
    return has_own_state(env)


def save(env: Any) -> dict[str, Any]:
    """Return the state of ``env`` and its wrappers as tensors and plain Python values.

    Raises:
        UnsavableError: a value in it can't be saved.
    """
    from recurl.envs.state_graph import GraphWriter  # noqa: PLC0415 - as above
    from recurl.envs.state_plain import MAX_BYTES  # noqa: PLC0415 - as above

    if isinstance(env, AsyncVectorEnv):
        return {"envs": [_state(*state) for state in env.get_attr("saved_state")]}
    return GraphWriter(MAX_BYTES * getattr(env, "num_envs", 1)).written(env)


def restore(env: Any, state: dict[str, Any]) -> None:
    """Restore a state returned by :func:`save` on ``env``, which must be constructed the same way.

    Raises:
        UnfitStateError: the state belongs to another environment, or contains values that don't fit this one. The
            environment must be reset afterwards, because the state may be partially restored.
    """
    from recurl.envs.state_graph import GraphReader  # noqa: PLC0415 - as above

    env.reset()  # creates the objects that an environment creates at its first reset
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
    """Restore a state saved by an earlier version: the result of ``get_state()`` and the step counts of time limits."""
    from recurl.envs.state_graph import has_own_state  # noqa: PLC0415 - as above

    if isinstance(env, SyncVectorEnv):
        for child, saved in zip(env.envs, state["envs"], strict=True):
            child.reset()
            _restore_legacy(child, saved)
        return
    if not has_own_state(env.unwrapped):
        raise ArgumentError(f"The state is from a different environment than {env}.")
    env.unwrapped.set_state(_to_arrays(state["env"]))
    for limit, elapsed in zip(_limits(env), state["elapsed"], strict=True):
        set_elapsed_steps(limit, elapsed)


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
    """Return a factory of environments like ``env``, or None if none is known."""
    if isinstance(env, SyncVectorEnv):
        return partial(SyncVectorEnv, list(env.env_fns)[:2], autoreset_mode=env.autoreset_mode)
    spec: Any = env.spec
    return None if spec is None or isinstance(env, VectorEnv) else partial(gym.make, spec)


def cores(env: Gym) -> list[object]:
    """Return the unwrapped environments."""
    if isinstance(env, SyncVectorEnv):
        return [core for child in env.envs for core in cores(child)]
    return [env.unwrapped]
