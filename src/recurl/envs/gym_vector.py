"""Gymnasium vector environments, adapted to behave as with autoreset disabled.

Gymnasium's default autoreset adds one step per episode in which the action is ignored. There is no such step here: a
done row keeps its true final observation until it is reset with ``reset(options={"reset_mask": mask})``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from recurl.envs.gym_wrappers import Wrap, wrapped
from recurl.errors import ArgumentError, ArgumentTypeError, MissingDependencyError, UsageError
from recurl.importing import pip_line

__all__ = [
    "SameStepVectorEnv",
    "SingleRowsVectorEnv",
    "autoreset_disabled",
    "make",
    "make_vector",
    "native_row",
    "vector_of",
]

_MODES = (None, "sync", "async", "vector_entry_point")


def make(name: str, wrappers: Sequence[Wrap], **kwargs: Any) -> gym.Env[Any, Any]:
    """Return ``gymnasium.make(name, **kwargs)`` in ``wrappers``, the first innermost.

    Raises:
        ArgumentTypeError: ``name`` is an environment, or anything else that is not an id; or a wrapper returns no
            environment.
        ArgumentError: the environment is unknown to Gymnasium.
        MissingDependencyError: the environment needs a package that is not installed.
    """
    _check_id(name)
    return wrapped(_with_clear_errors(name, lambda: gym.make(name, **kwargs)), wrappers)


def make_vector(
    name: str, num_envs: int, mode: str | None, wrappers: Sequence[Wrap], **kwargs: Any
) -> VectorEnv[Any, Any, Any]:
    """Return ``num_envs`` environments that step together, with autoreset disabled.

    Args:
        name: a Gymnasium id.
        num_envs: number of environments, at least 1.
        mode: ``"sync"``, ``"async"`` (spawned processes), ``"vector_entry_point"`` (the environment's native vector
            implementation) or None: the native one if its autoreset can be disabled and there are no wrappers, else
            ``"sync"``.
        wrappers: wrappers of each environment, the first innermost.
        **kwargs: keyword arguments of the environment's constructor.

    Raises:
        ArgumentTypeError: ``name`` is an environment, or anything else that is not an id.
        ArgumentError: ``num_envs`` is below 1, ``mode`` or the id is unknown, or ``mode`` requires a native vector
            implementation, which the environment lacks or ``wrappers`` exclude.
        MissingDependencyError: the environment needs a package that is not installed.
    """
    _check_id(name)
    if num_envs < 1:
        raise ArgumentError(f"num_envs must be at least 1, or None for one unbatched environment, got {num_envs}.")
    if mode not in _MODES:
        raise ArgumentError(f"vectorization_mode must be one of {_MODES}, got {mode!r}.")
    if wrappers and mode == "vector_entry_point":
        raise ArgumentError(
            f"Wrappers need single environments, which the native vector environment of {name!r} has not: take "
            'vectorization_mode="sync" or "async".'
        )
    return _with_clear_errors(name, lambda: _make_vector(name, num_envs, mode, wrappers, kwargs))


def _check_id(name: object) -> None:
    if isinstance(name, str):
        return
    hint = " Wrap an environment with GymWrapper(env)." if isinstance(name, gym.Env | VectorEnv) else ""
    raise ArgumentTypeError(f"GymEnv takes the id of an environment, such as 'CartPole-v1', got {name!r}.{hint}")


def _make_vector(
    name: str, num_envs: int, mode: str | None, wrappers: Sequence[Wrap], kwargs: dict[str, Any]
) -> VectorEnv[Any, Any, Any]:
    spec = _spec(name)
    if mode is None:
        has_native = spec.vector_entry_point and not wrappers
        native = _native(name, num_envs, AutoresetMode.DISABLED, kwargs) if has_native else None
        if native is not None:
            return native
        mode = "sync" if spec.entry_point else "vector_entry_point"
    if mode == "vector_entry_point":
        return _make_native(name, num_envs, kwargs)
    settings = _settings(mode)
    return gym.make_vec(name, num_envs, mode, vector_kwargs=settings, wrappers=cast(Any, wrappers), **kwargs)


def _settings(mode: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
    return {**settings, "context": "spawn"} if mode == "async" else settings


def vector_of(creators: Sequence[Callable[[], gym.Env[Any, Any]]], mode: str | None) -> VectorEnv[Any, Any, Any]:
    """Return environments that step together, each made by a function, with autoreset disabled.

    Args:
        creators: the functions.
        mode: ``"async"`` for spawned processes, ``"sync"`` or None for this one.

    Raises:
        ArgumentError: two functions return the same environment.
    """
    if mode == "async":
        return gym.vector.AsyncVectorEnv(creators, **_settings(mode))
    env = gym.vector.SyncVectorEnv(creators, **_settings("sync"))
    if len({id(single.unwrapped) for single in env.envs}) < len(creators):
        raise ArgumentError("A function that makes an environment must make a new one at every call.")
    return env


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


def native_row(name: str, **kwargs: Any) -> VectorEnv[Any, Any, Any] | None:
    """Return the native vector environment with one row and autoreset disabled, or None if there is none.

    Args:
        name: a Gymnasium id.
        **kwargs: keyword arguments of the environment's constructor.

    Raises:
        ArgumentError: the environment is unknown to Gymnasium.
        MissingDependencyError: the environment needs a package that is not installed.
    """

    def build() -> VectorEnv[Any, Any, Any] | None:
        return _native(name, 1, AutoresetMode.DISABLED, kwargs) if _spec(name).vector_entry_point else None

    _check_id(name)
    return _with_clear_errors(name, build)


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
    except ModuleNotFoundError as error:
        raise _lacking(name, error) from error
    except (gym.error.NameNotFound, gym.error.NamespaceNotFound) as error:
        hint = "" if "Did you mean" in str(error) else _MODULE_HINT
        raise ArgumentError(f"Gymnasium can't create {name!r}: {error}{hint}") from error
    except (gym.error.Error, ImportError) as error:
        raise ArgumentError(f"Gymnasium can't create {name!r}: {error}") from error


def _lacking(name: str, error: ModuleNotFoundError) -> Exception:
    module = name.rpartition(":")[0]
    if error.name is not None and error.name.partition(".")[0] != module.partition(".")[0]:
        return MissingDependencyError(
            f"The environment {name!r} needs the module {error.name!r}, which is not installed: {pip_line(error.name)}"
        )
    return ArgumentError(
        f"Gymnasium can't create {name!r}: there is no module {module!r}: install it ({pip_line(module)}), or name a "
        "file in the working directory or in a folder on PYTHONPATH."
    )


_MODULE_HINT = (
    " An environment that a module registers is written module:id, such as ale_py:ALE/Pong-v5 or my_module:My-v0."
)


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
                rows[index] = _row(info["final_obs"], index)
            out = create_empty_array(self.single_observation_space, self.num_envs)
            observations = concatenate(self.single_observation_space, rows, out)
        return observations, rewards, terminated, truncated, info


def _row(batched: Any, index: int) -> Any:
    if isinstance(batched, dict):
        return {name: _row(value, index) for name, value in batched.items()}
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
