"""Gymnasium vector environments, adapted to behave as if autoreset were disabled.

Gymnasium's default autoreset adds one step per episode in which the action is ignored. These environments have no such
step: a done row keeps its true final observation until it is reset with ``reset(options={"reset_mask": mask})``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from recurl.core.errors import ArgumentError, UsageError, WorkerError
from recurl.envs.gym_state import SavedState
from recurl.envs.gym_wrappers import Wrap, check_id, spec_of, with_clear_errors, wrapped
from recurl.envs.gymnasium_compat import SyncVectorEnv, add_info, forget_pending

__all__ = [
    "AsyncVectorEnv",
    "SameStepVectorEnv",
    "SingleRowsVectorEnv",
    "SyncVectorEnv",
    "autoreset_disabled",
    "make",
    "make_vector",
    "native_row",
    "vector_of",
]

_MODES = (None, "sync", "async", "vector_entry_point")
_CONTEXT = "spawn"  # start method of Gymnasium's processes
_TIMEOUT_SECONDS = 60.0  # limit for a reset or step in a process


def make(name: str, wrappers: Sequence[Wrap], /, **kwargs: Any) -> gym.Env[Any, Any]:
    """Return ``gymnasium.make(name, **kwargs)`` wrapped in ``wrappers``, the first innermost.

    Raises:
        ArgumentTypeError: ``name`` is an environment or another object that isn't an id, or a wrapper doesn't return an
            environment.
        ArgumentError: Gymnasium doesn't know the environment.
        MissingDependencyError: the environment needs a package that is not installed.
    """
    check_id(name)
    return wrapped(with_clear_errors(name, lambda: gym.make(name, **kwargs)), wrappers)


def make_vector(
    name: str,
    num_envs: int,
    mode: str | None,
    wrappers: Sequence[Wrap] = (),
    shared_memory: bool = True,
    /,
    **kwargs: Any,
) -> VectorEnv[Any, Any, Any]:
    """Return a vector environment of ``num_envs`` rows, with autoreset disabled.

    Args:
        name: a Gymnasium id.
        num_envs: number of environments, at least 1.
        mode: ``"sync"``, ``"async"`` (spawned processes), ``"vector_entry_point"`` (the environment's native vector
            implementation), or None: the native one if its autoreset can be disabled and there are no wrappers,
            otherwise ``"sync"``.
        wrappers: wrappers of each environment, the first innermost.
        shared_memory: with ``"async"``, send observations through shared memory, which must support all entries,
            instead of pipes, which also support graphs and sequences.
        **kwargs: keyword arguments of the environment's constructor.

    Raises:
        ArgumentTypeError: ``name`` is an environment or another object that isn't an id.
        ArgumentError: ``num_envs`` is below 1, ``mode`` or the id is unknown, or ``mode`` requires a native vector
            implementation, which the environment lacks or ``wrappers`` rule out.
        MissingDependencyError: the environment needs a package that is not installed.
    """
    check_id(name)
    if num_envs < 1:
        raise ArgumentError(f"num_envs must be at least 1, or None for one unbatched environment, got {num_envs}.")
    if mode not in _MODES:
        raise ArgumentError(f"vectorization_mode must be one of {_MODES}, got {mode!r}.")
    if wrappers and mode == "vector_entry_point":
        raise ArgumentError(
            f"Wrappers need single environments, which the native vector environment of {name!r} doesn't have: use "
            'vectorization_mode="sync" or "async".'
        )
    return with_clear_errors(name, lambda: _make_vector(name, num_envs, mode, wrappers, shared_memory, kwargs))


def _make_vector(
    name: str, num_envs: int, mode: str | None, wrappers: Sequence[Wrap], shared_memory: bool, kwargs: dict[str, Any]
) -> VectorEnv[Any, Any, Any]:
    spec = spec_of(name)
    if mode is None:
        has_native = spec.vector_entry_point and not wrappers
        native = _native(name, num_envs, AutoresetMode.DISABLED, kwargs) if has_native else None
        if native is not None:
            return native
        mode = "sync" if spec.entry_point else "vector_entry_point"
    if mode == "vector_entry_point":
        return _make_native(name, num_envs, kwargs)
    if mode == "sync":
        env = SyncVectorEnv([lambda: wrapped(gym.make(name, **kwargs), wrappers)] * num_envs, **_settings(mode))
        env.spec = spec
        return env
    create = partial(_with_saved_state, lambda: wrapped(gym.make(spec, **kwargs), wrappers))
    env = AsyncVectorEnv([create] * num_envs, **_settings(mode, shared_memory))
    env.spec = spec
    return env


def _settings(mode: str, shared_memory: bool = True) -> dict[str, Any]:
    settings: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
    return {**settings, "context": _CONTEXT, "shared_memory": shared_memory} if mode == "async" else settings


def vector_of(
    creators: Sequence[Callable[[], gym.Env[Any, Any]]], mode: str | None, shared_memory: bool = True
) -> VectorEnv[Any, Any, Any]:
    """Return a vector environment with one row per function in ``creators``, with autoreset disabled.

    Args:
        creators: functions that each create an environment.
        mode: ``"async"`` for spawned processes, ``"sync"`` or None for this process.
        shared_memory: see :func:`make_vector`.

    Raises:
        ArgumentError: two functions return the same environment.
    """
    if mode == "async":
        return AsyncVectorEnv(
            [partial(_with_saved_state, create) for create in creators], **_settings(mode, shared_memory)
        )
    env = SyncVectorEnv(creators, **_settings("sync"))
    if len({id(single.unwrapped) for single in env.envs}) < len(creators):
        raise ArgumentError("A function that creates an environment must create a new one at every call.")
    return env


def _with_saved_state(create: Callable[[], gym.Env[Any, Any]]) -> gym.Env[Any, Any]:
    return SavedState(create())


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
    """Return the native vector environment in the autoreset mode ``wanted``, or None if the mode isn't supported."""
    options: dict[str, Any] = {"autoreset_mode": wanted, **kwargs}
    try:
        env = gym.make_vec(name, num_envs, "vector_entry_point", **options)
    except Exception as error:
        # The argument or its value is not supported. Other errors will be raised again without it.
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
        ArgumentError: Gymnasium doesn't know the environment.
        MissingDependencyError: the environment needs a package that is not installed.
    """

    def build() -> VectorEnv[Any, Any, Any] | None:
        return _native(name, 1, AutoresetMode.DISABLED, kwargs) if spec_of(name).vector_entry_point else None

    check_id(name)
    return with_clear_errors(name, build)


def _mode_of(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return the autoreset mode in the metadata of ``env``, or Gymnasium's default if there is none."""
    return AutoresetMode((env.metadata or {}).get("autoreset_mode", AutoresetMode.NEXT_STEP))


def autoreset_disabled(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    """Return ``env``, or an adapter around it, such that done rows are kept until they are reset.

    Raises:
        ArgumentError: ``env`` resets in the step after the end of an episode, which ignores its action.
    """
    mode = _mode_of(env)
    if mode is AutoresetMode.DISABLED:
        return env
    if mode is AutoresetMode.SAME_STEP:
        return SameStepVectorEnv(env)
    raise ArgumentError(
        f"{env} resets in the step after the end of an episode, which ignores its action: construct it with "
        "autoreset_mode=AutoresetMode.DISABLED (or SAME_STEP)."
    )


class AsyncVectorEnv(gym.vector.AsyncVectorEnv):
    """Version of Gymnasium's ``AsyncVectorEnv`` that raises if one of its processes hangs.

    Raises:
        WorkerError: (at a reset or step) an environment hasn't replied for a minute. All processes were killed.

    Example:
        >>> AsyncVectorEnv.__mro__[1]
        <class 'gymnasium.vector.async_vector_env.AsyncVectorEnv'>
    """

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the results of a reset."""
        self._check_answers(timeout)
        return super().reset_wait(timeout)

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Wait for the results of a step."""
        self._check_answers(timeout)
        return super().step_wait(timeout)

    def _check_answers(self, timeout: float | None) -> None:
        if timeout is not None or self.closed:  # Gymnasium's own limit or error
            return
        end = time.monotonic() + _TIMEOUT_SECONDS
        if all(pipe.poll(max(0.0, end - time.monotonic())) for pipe in self.parent_pipes):
            return
        silent = [index for index, pipe in enumerate(self.parent_pipes) if not pipe.poll(0)]
        named = ", ".join(f"{index} (process {self.processes[index].pid})" for index in silent)
        for process in self.processes:
            process.kill()  # a stopped process ignores other signals
        forget_pending(self)
        self.close(terminate=True)
        raise WorkerError(
            f"Environment {named} hangs: no answer for {_TIMEOUT_SECONDS:g} s. All processes were killed."
        )


class SameStepVectorEnv(gym.vector.VectorWrapper):
    """Adapter that turns a vector environment which resets within the step into one with autoreset disabled.

    The step returns the final observation and info (``info["final_obs"]``, ``info["final_info"]``); the next reset
    returns those of the reset. A partial reset is only possible for done rows.

    Args:
        env: a vector environment in ``AutoresetMode.SAME_STEP``.

    Raises:
        UsageError: (at a partial reset) a row to reset is not done.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self.metadata = {**(env.metadata or {}), "autoreset_mode": AutoresetMode.DISABLED}
        self._started: tuple[Any, dict[str, Any]] = None, {}
        self._done = np.zeros(env.num_envs, dtype=np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all rows, or return the first observations of the done rows in ``options["reset_mask"]``."""
        mask = None if options is None else options.get("reset_mask")
        if mask is None or (mask.all() and not self._done.all()):
            self._done[:] = False
            self._started = self.env.reset(seed=seed)
            return self._started
        if (mask & ~self._done).any():
            raise UsageError(
                f"{self.env} can only reset done rows, but rows {np.flatnonzero(mask & ~self._done)} to reset are not "
                "done: use autoreset_mode=AutoresetMode.DISABLED."
            )
        self._done &= ~mask
        return self._started

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all rows. Done rows return their final observation."""
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        self._started = observations, info
        self._done = np.logical_or(terminated, truncated)
        if self._done.any():
            info = self._final(info)
            rows = list(iterate(self.observation_space, observations))
            final = self._started[1]["final_obs"]
            for index in np.flatnonzero(self._done).tolist():
                rows[index] = _row(self.single_observation_space, final, index)
            out = create_empty_array(self.single_observation_space, self.num_envs)
            observations = concatenate(self.single_observation_space, rows, out)
        return observations, rewards, terminated, truncated, info

    def _final(self, info: dict[str, Any]) -> dict[str, Any]:
        final: Any = info.get("final_info", {})
        if not isinstance(final, dict):  # one dict per row
            rows, final = final, dict[str, Any]()
            for index in np.flatnonzero(self._done).tolist():
                final = add_info(self, final, rows[index] or {}, index)
        own = ("final_obs", "_final_obs", "final_info", "_final_info")
        return _final_info({name: value for name, value in info.items() if name not in own}, final, self._done)


def _row(space: gym.Space[Any], batched: Any, index: Any) -> Any:
    """Return a row (for a slice: several rows) of batched observations or actions of ``space``.

    A Gymnasium ``info`` may hold whole dicts and tuples in an object array.
    """
    if isinstance(space, gym.spaces.Dict) and isinstance(batched, dict):
        return {name: _row(child, batched[name], index) for name, child in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple) and isinstance(batched, tuple):
        return tuple(_row(child, value, index) for child, value in zip(space.spaces, batched, strict=True))
    return batched[index]


def _final_info(info: dict[str, Any], final: dict[str, Any], done: Any) -> dict[str, Any]:
    """Return ``info`` with the done rows replaced by the info of their final steps: dicts of arrays over all rows.

    As in Gymnasium, ``_name`` marks the rows that have an entry ``name``; done rows that lack it in ``final`` are not
    marked.
    """
    out: dict[str, Any] = {}
    for name in (*info, *(name for name in final if name not in info)):
        now, value = info.get(name), final.get(name)
        if isinstance(now, dict) or isinstance(value, dict):
            out[name] = _final_info(now or {}, value or {}, done)
            continue
        out[name] = now if value is None else _merge_rows(now, value, done)
        if not name.startswith("_"):
            present = np.asarray(info.get(f"_{name}", np.full(len(done), now is not None)))
            out[f"_{name}"] = _merge_rows(
                present, np.asarray(final.get(f"_{name}", np.full(len(done), value is not None))), done
            )
    return out


def _merge_rows(now: Any, value: Any, done: Any) -> Any:
    out = np.zeros_like(value) if now is None else np.array(now)
    out[done] = value[done]
    return out


def _only_row(info: dict[str, Any]) -> dict[str, Any]:
    """Return the info of a single environment, given the info of a vector environment with one row."""
    return {
        name: _only_row(value) if isinstance(value, dict) else value[0]
        for name, value in info.items()
        if isinstance(value, dict)
        or (isinstance(value, np.ndarray) and len(value) and info.get(f"_{name}", (True,))[0])
    }


class SingleRowsVectorEnv(VectorEnv[Any, Any, Any]):
    """Batch of single-row vector environments, stepped together and reset individually.

    It runs native vector environments that always reset in the step after the end of an episode, and avoids that step
    by resetting each row before its autoreset would happen.

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
        info: dict[str, Any] = {}
        for index in np.flatnonzero(mask):
            observation, row_info = self.rows[index].reset(seed=None if seed is None else seed + int(index))
            self._observations[index] = next(iterate(self.rows[index].observation_space, observation))
            info = self._with_info(info, row_info, int(index))
        return self._batched(), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every row."""
        results, info = np.zeros((3, self.num_envs)), dict[str, Any]()
        for index, row in enumerate(self.rows):
            observation, *result, row_info = row.step(_row(self.single_action_space, actions, slice(index, index + 1)))
            info = self._with_info(info, row_info, index)
            self._observations[index] = next(iterate(row.observation_space, observation))
            results[:, index] = [part[0] for part in result]
        return self._batched(), results[0], results[1] != 0, results[2] != 0, info

    def _with_info(self, info: dict[str, Any], row_info: dict[str, Any], index: int) -> dict[str, Any]:
        """Return ``info`` with the info of a single-row vector environment added."""
        return add_info(self, info, _only_row(row_info), index) if row_info else info

    def _batched(self) -> Any:
        out = create_empty_array(self.single_observation_space, self.num_envs)
        return concatenate(self.single_observation_space, self._observations, out)

    def close_extras(self, **kwargs: Any) -> None:
        """Close every row."""
        for row in self.rows:
            row.close(**kwargs)
