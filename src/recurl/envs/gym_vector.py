"""Gymnasium vector environments, adapted to behave as with autoreset disabled.

Gymnasium's default autoreset adds one step per episode in which the action is ignored. There is no such step here: a
done row keeps its true final observation until it is reset with ``reset(options={"reset_mask": mask})``.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from recurl.errors import ArgumentError, ArgumentTypeError, MissingDependencyError, UsageError

__all__ = ["SameStepVectorEnv", "SingleRowsVectorEnv", "autoreset_disabled", "make", "make_vector"]

_MODES = (None, "sync", "async", "vector_entry_point")


def make(name: str, **kwargs: Any) -> gym.Env[Any, Any]:
    """Return ``gymnasium.make(name, **kwargs)``.

    Raises:
        ArgumentTypeError: ``name`` is an environment, or anything else that is not an id.
        ArgumentError: the environment is unknown to Gymnasium.
        MissingDependencyError: the environment needs a package that is not installed.
    """
    _check_id(name)
    return _with_clear_errors(name, lambda: gym.make(name, **kwargs))


def make_vector(
    name: str, num_envs: int, mode: str | None, shared_memory: bool = True, /, **kwargs: Any
) -> VectorEnv[Any, Any, Any]:
    """Return ``num_envs`` environments that step together, with autoreset disabled.

    Args:
        name: a Gymnasium id.
        num_envs: number of environments, at least 1.
        mode: ``"sync"``, ``"async"`` (spawned processes), ``"vector_entry_point"`` (the environment's native vector
            implementation) or None: the native one if its autoreset can be disabled, else ``"sync"``.
        shared_memory: with ``"async"``, send observations through shared memory, which all entries must fit into,
            rather than through pipes, which take graphs and sequences too.
        **kwargs: keyword arguments of the environment's constructor.

    Raises:
        ArgumentTypeError: ``name`` is an environment, or anything else that is not an id.
        ArgumentError: ``num_envs`` is below 1, ``mode`` or the id is unknown, or the environment has no native vector
            implementation but ``mode`` requires one.
        MissingDependencyError: the environment needs a package that is not installed.
    """
    _check_id(name)
    if num_envs < 1:
        raise ArgumentError(f"num_envs must be at least 1, or None for one unbatched environment, got {num_envs}.")
    if mode not in _MODES:
        raise ArgumentError(f"vectorization_mode must be one of {_MODES}, got {mode!r}.")
    return _with_clear_errors(name, lambda: _make_vector(name, num_envs, mode, shared_memory, kwargs))


def _check_id(name: object) -> None:
    if isinstance(name, str):
        return
    hint = " Wrap an environment with GymWrapper(env)." if isinstance(name, gym.Env | VectorEnv) else ""
    raise ArgumentTypeError(f"GymEnv takes the id of an environment, such as 'CartPole-v1', got {name!r}.{hint}")


def _make_vector(
    name: str, num_envs: int, mode: str | None, shared_memory: bool, kwargs: dict[str, Any]
) -> VectorEnv[Any, Any, Any]:
    spec = _spec(name)
    if mode is None:
        native = _native(name, num_envs, AutoresetMode.DISABLED, kwargs) if spec.vector_entry_point else None
        if native is not None:
            return native
        mode = "sync" if spec.entry_point else "vector_entry_point"
    if mode == "vector_entry_point":
        return _make_native(name, num_envs, kwargs)
    settings: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
    if mode == "async":
        settings |= {"context": "spawn", "shared_memory": shared_memory}
    return gym.make_vec(name, num_envs, mode, vector_kwargs=settings, **kwargs)


def _make_native(name: str, num_envs: int, kwargs: dict[str, Any]) -> VectorEnv[Any, Any, Any]:
    for wanted in (AutoresetMode.DISABLED, AutoresetMode.SAME_STEP):
        native = _native(name, num_envs, wanted, kwargs)
        if native is not None:
            return autoreset_disabled(native)
    env = gym.make_vec(name, num_envs, "vector_entry_point", **kwargs)
    if _mode_of(env) is not AutoresetMode.NEXT_STEP:
        return autoreset_disabled(env)
    env.close()
    return SingleRowsVectorEnv([gym.make_vec(name, 1, "vector_entry_point", **kwargs) for _ in range(num_envs)])


def _native(name: str, num_envs: int, wanted: AutoresetMode, kwargs: dict[str, Any]) -> VectorEnv[Any, Any, Any] | None:
    """Return the native vector environment in the autoreset mode ``wanted``, or None if it doesn't support it."""
    options: dict[str, Any] = {"autoreset_mode": wanted, **kwargs}
    try:
        env = gym.make_vec(name, num_envs, "vector_entry_point", **options)
    except Exception as error:
        # The argument or its value is not supported; any other error will be raised again without it.
        if isinstance(error, TypeError) or "autoreset" in str(error).lower():
            return None
        raise
    if _mode_of(env) is wanted:
        return env
    env.close()
    return None


def _spec(name: str) -> EnvSpec:
    module, _, identifier = name.rpartition(":")
    if module:
        importlib.import_module(module)
    return gym.spec(identifier)


def _mode_of(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return the autoreset mode in the metadata of ``env``; Gymnasium's default if there is none."""
    return AutoresetMode((env.metadata or {}).get("autoreset_mode", AutoresetMode.NEXT_STEP))


def _with_clear_errors(name: str, build: Any) -> Any:
    try:
        return build()
    except gym.error.DependencyNotInstalled as error:
        raise MissingDependencyError(f"The environment {name!r} needs a package that is missing: {error}") from error
    except (gym.error.Error, ImportError) as error:
        raise ArgumentError(f"Gymnasium can't create {name!r}: {error}") from error


def autoreset_disabled(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    """Return ``env``, or an adapter around it, that keeps done rows until they are reset.

    Raises:
        ArgumentError: ``env`` resets in the step after the end of an episode, whose action is ignored.
    """
    mode = _mode_of(env)
    if mode is AutoresetMode.DISABLED:
        return env
    if mode is AutoresetMode.SAME_STEP:
        return SameStepVectorEnv(env)
    raise ArgumentError(
        f"{env} resets in the step after the end of an episode, and the action of that step is lost: construct it with "
        "autoreset_mode=AutoresetMode.DISABLED (or SAME_STEP)."
    )


class SameStepVectorEnv(gym.vector.VectorWrapper):
    """Adapter of a vector environment that resets within the step to one with autoreset disabled.

    The final observation (``info["final_obs"]``) is returned by the step, the reset observation by the reset after it.
    A partial reset is only possible for done rows.

    Args:
        env: a vector environment in ``AutoresetMode.SAME_STEP``.

    Raises:
        UsageError: (at a partial reset) a row to reset is not done.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self.metadata = {**(env.metadata or {}), "autoreset_mode": AutoresetMode.DISABLED}
        self._started: Any = None
        self._done = np.zeros(env.num_envs, dtype=np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all rows, or return the first observations of the done rows in ``options["reset_mask"]``."""
        mask = None if options is None else options.get("reset_mask")
        if mask is None or (mask.all() and not self._done.all()):
            self._done[:] = False
            self._started, info = self.env.reset(seed=seed)
            return self._started, info
        if (mask & ~self._done).any():
            raise UsageError(
                f"{self.env} can only reset done rows, but rows {np.flatnonzero(mask & ~self._done)} to reset are not "
                "done: use autoreset_mode=AutoresetMode.DISABLED."
            )
        self._done &= ~mask
        return self._started, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all rows; done rows return their final observation."""
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        self._started = observations
        self._done = np.logical_or(terminated, truncated)
        if self._done.any():
            rows = list(iterate(self.observation_space, observations))
            for index in np.flatnonzero(self._done).tolist():
                rows[index] = _row(self.single_observation_space, info["final_obs"], index)
            out = create_empty_array(self.single_observation_space, self.num_envs)
            observations = concatenate(self.single_observation_space, rows, out)
        return observations, rewards, terminated, truncated, info


def _row(space: gym.Space[Any], batched: Any, index: int) -> Any:
    """Return the observation of one environment; a Gymnasium ``info`` may hold whole tuples in an array of objects."""
    if isinstance(space, gym.spaces.Dict):
        return {name: _row(child, batched[name], index) for name, child in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple) and isinstance(batched, tuple):
        return tuple(_row(child, value, index) for child, value in zip(space.spaces, batched, strict=True))
    return batched[index]


class SingleRowsVectorEnv(VectorEnv[Any, Any, Any]):
    """Batch of vector environments of one row each, stepped together and reset individually.

    Runs a native vector environment that always resets in the step after the end of an episode without such steps:
    each row is reset before its autoreset would happen.

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
