"""Gymnasium's vector environments, all made to behave as with autoreset disabled.

Gymnasium's default autoreset spends one step per episode in which the action is ignored. Here no such step exists: a
done row keeps its true final observation and waits until it is reset by ``reset(options={"reset_mask": mask})``.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from recurl.errors import ArgumentError, MissingDependencyError, UsageError

__all__ = ["SameStepVectorEnv", "SingleRowsVectorEnv", "autoreset_disabled", "make", "make_vector"]

_MODES = (None, "sync", "async", "vector_entry_point")


def make(name: str, **kwargs: Any) -> gym.Env[Any, Any]:
    """Return ``gymnasium.make(name, **kwargs)``.

    Raises:
        ArgumentError: Gymnasium knows no such environment.
        MissingDependencyError: the environment needs a package that is not installed.
    """
    return _translated(name, lambda: gym.make(name, **kwargs))


def make_vector(name: str, num_envs: int, mode: str | None, **kwargs: Any) -> VectorEnv[Any, Any, Any]:
    """Return ``num_envs`` environments that step together, with autoreset disabled.

    Args:
        name: a Gymnasium id.
        num_envs: number of environments, at least 1.
        mode: ``"sync"``, ``"async"`` (spawned processes), ``"vector_entry_point"`` (the environment's own vector
            form) or None: its own vector form when that lets autoreset be disabled, ``"sync"`` otherwise.
        **kwargs: for the environment's constructor.

    Raises:
        ArgumentError: ``num_envs`` below 1, an unknown ``mode`` or id, or no vector form where one is asked for.
        MissingDependencyError: the environment needs a package that is not installed.
    """
    if num_envs < 1:
        raise ArgumentError(f"num_envs must be at least 1, or None for one unbatched environment, got {num_envs}.")
    if mode not in _MODES:
        raise ArgumentError(f"vectorization_mode must be one of {_MODES}, got {mode!r}.")
    return _translated(name, lambda: _make_vector(name, num_envs, mode, kwargs))


def _make_vector(name: str, num_envs: int, mode: str | None, kwargs: dict[str, Any]) -> VectorEnv[Any, Any, Any]:
    disabled = AutoresetMode.DISABLED
    native = _takes_autoreset_mode(name)
    if mode is None:
        mode = "vector_entry_point" if native else "sync"
    if mode == "vector_entry_point":
        if native:
            kwargs = {**kwargs, "autoreset_mode": disabled}
        env = gym.make_vec(name, num_envs, mode, **kwargs)
        if _mode_of(env) is AutoresetMode.NEXT_STEP:
            env.close()
            rows = [gym.make_vec(name, 1, mode, **kwargs) for _ in range(num_envs)]
            return SingleRowsVectorEnv(rows)
        return autoreset_disabled(env)
    settings: dict[str, Any] = {"autoreset_mode": disabled, "copy": False}
    if mode == "async":
        settings["context"] = "spawn"
    return gym.make_vec(name, num_envs, mode, vector_kwargs=settings, **kwargs)


def _takes_autoreset_mode(name: str) -> bool:
    module, _, identifier = name.rpartition(":")
    if module:
        importlib.import_module(module)
    creator = gym.spec(identifier).vector_entry_point
    if creator is None:
        return False
    function = load_env_creator(creator) if isinstance(creator, str) else creator
    return "autoreset_mode" in inspect.signature(function).parameters


def _mode_of(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return the autoreset mode ``env`` says it has; Gymnasium's default when it says none."""
    return AutoresetMode((env.metadata or {}).get("autoreset_mode", AutoresetMode.NEXT_STEP))


def _translated(name: str, build: Any) -> Any:
    try:
        return build()
    except gym.error.DependencyNotInstalled as error:
        raise MissingDependencyError(f"The environment {name!r} needs a package that is missing: {error}") from error
    except (gym.error.Error, ModuleNotFoundError) as error:
        raise ArgumentError(f"Gymnasium can't make {name!r}: {error}") from error


def autoreset_disabled(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    """Return ``env``, or an adapter around it, that leaves done rows alone until they are reset.

    Raises:
        ArgumentError: ``env`` resets at the step after the episode's end, whose action is lost.
    """
    mode = _mode_of(env)
    if mode is AutoresetMode.DISABLED:
        return env
    if mode is AutoresetMode.SAME_STEP:
        return SameStepVectorEnv(env)
    raise ArgumentError(
        f"{env} resets an episode in the step after its end, and that step's action is lost: construct it with "
        "autoreset_mode=AutoresetMode.DISABLED (or SAME_STEP)."
    )


class SameStepVectorEnv(gym.vector.VectorWrapper):
    """A vector environment that resets within the step, shown as one with autoreset disabled.

    The final observation (``info["final_obs"]``) is returned by the step, the reset observation by the reset after it.
    Only rows that are done can be reset alone.

    Args:
        env: a vector environment in ``AutoresetMode.SAME_STEP``.

    Raises:
        UsageError: some, not all, rows are to be reset and one of them is not done.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self._started: Any = None
        self._done = np.zeros(env.num_envs, dtype=np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all rows, or show the started episodes of the done rows in ``options["reset_mask"]``."""
        mask = None if options is None else options.get("reset_mask")
        if mask is None or (mask.all() and not self._done.all()):
            self._done[:] = False
            self._started, info = self.env.reset(seed=seed)
            return self._started, info
        if (mask & ~self._done).any():
            raise UsageError(
                f"{self.env} resets done rows by itself and no others, but rows {np.flatnonzero(mask & ~self._done)} "
                "are to be reset although they are not done: use autoreset_mode=AutoresetMode.DISABLED."
            )
        self._done &= ~mask
        return self._started, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all rows; done rows show their final observation."""
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        self._started = observations
        self._done = np.logical_or(terminated, truncated)
        if self._done.any():
            rows = list(iterate(self.observation_space, observations))
            for index in np.flatnonzero(self._done).tolist():
                rows[index] = _row(info["final_obs"], index)
            out = create_empty_array(self.single_observation_space, self.num_envs)
            observations = concatenate(self.single_observation_space, rows, out)
        return observations, rewards, terminated, truncated, info


def _row(batched: Any, index: int) -> Any:
    if isinstance(batched, dict):
        return {name: _row(value, index) for name, value in batched.items()}
    return batched[index]


class SingleRowsVectorEnv(VectorEnv[Any, Any, Any]):
    """Vector environments of one row each, stepped together and reset one by one: autoreset never comes to pass.

    The way to run, without dead steps, an environment whose vector form always resets at the step after the end.

    Args:
        rows: vector environments with ``num_envs == 1``.
    """

    def __init__(self, rows: list[VectorEnv[Any, Any, Any]]) -> None:
        self.rows = rows
        self.num_envs = len(rows)
        self.metadata = {**(rows[0].metadata or {}), "autoreset_mode": AutoresetMode.DISABLED}
        self.single_observation_space = rows[0].single_observation_space
        self.single_action_space = rows[0].single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._observations: list[Any] = [None] * self.num_envs

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all rows (row i with ``seed + i``), or those of ``options["reset_mask"]``."""
        mask = np.ones(self.num_envs, np.bool_) if options is None else options["reset_mask"]
        for index in np.flatnonzero(mask):
            observation, _ = self.rows[index].reset(seed=None if seed is None else seed + int(index))
            self._observations[index] = next(iterate(self.rows[index].observation_space, observation))
        return self._batched(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every row."""
        results = np.zeros((3, self.num_envs))
        for index, row in enumerate(self.rows):
            observation, *result, _ = row.step(actions[index : index + 1])
            self._observations[index] = next(iterate(row.observation_space, observation))
            results[:, index] = [part[0] for part in result]
        return self._batched(), results[0], results[1] != 0, results[2] != 0, {}

    def _batched(self) -> Any:
        out = create_empty_array(self.single_observation_space, self.num_envs)
        return concatenate(self.single_observation_space, self._observations, out)

    def close_extras(self, **kwargs: Any) -> None:
        """Close every row."""
        for row in self.rows:
            row.close(**kwargs)
