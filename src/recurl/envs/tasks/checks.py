"""Checks of a task's functions: shapes, dtypes, purity, and freshly allocated results."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from recurl.core.errors import ArgumentError, RecurlError
from recurl.core.seeding import derive_seed
from recurl.envs.tasks.dynamics import Dynamics, State, parts
from recurl.envs.tasks.namespaces import HOST, Draw, Namespace, RowDraw
from recurl.execution.source_lines import line_of

__all__ = ["TRIAL_SEED", "call_checked", "check_memory", "check_step"]

TRIAL_SEED = derive_seed(0, "trial of the dynamics")
"""Seed of the random numbers used to check a task, restarted for each call."""
_LIBRARY_FILES = tuple(
    str(Path(__file__).with_name(name)) for name in ("checks.py", "namespaces.py", "tensor_functions.py")
)
_ROUNDING = 1e-5  # relative difference of sums on a GPU from call to call


def check_step(dynamics: Dynamics, xp: Namespace, make_draw: Callable[[], Draw], rows: int) -> State:
    """Check the functions of a task by playing one step, and return the initial state.

    Each function is called twice. It must return the same result, and not modify its arguments.

    Args:
        dynamics: the task.
        xp: the namespace.
        make_draw: creates a source of random numbers for `rows` rows, the same numbers each time.
        rows: number of rows.

    Raises:
        ArgumentError: a function fails, returns an invalid result, or isn't pure.
    """
    initial = _call_twice(dynamics, "begin", lambda: call_checked(dynamics, "begin", xp, make_draw()))
    _check_state(dynamics, initial, rows)
    steps = xp.zeros(rows, dtype=xp.int64)
    observations = _call_twice(dynamics, "observe", lambda: call_checked(dynamics, "observe", xp, initial, steps))
    _check_observations(dynamics, observations, rows)
    actions = _zero_actions(dynamics, xp, rows)
    result = _call_twice(dynamics, "advance", lambda: call_checked(dynamics, "advance", xp, initial, steps, actions))
    if not isinstance(result, tuple) or len(result) != 3:
        raise ArgumentError(
            f"{_name(dynamics)}.advance must return the state, the rewards and terminated; got {_describe(result)}"
        )
    state, reward, terminated = result
    _check(dynamics, "advance", "the rewards", reward, "float", (rows,))
    _check(dynamics, "advance", "terminated", terminated, "bool", (rows,))
    found = _describe(state)
    if found != _describe(initial):
        raise ArgumentError(
            f"{_name(dynamics)}.advance must return a state like the one it got, {_describe(initial)}; got {found}"
        )
    return initial


def call_checked(
    dynamics: Dynamics,
    function: str,
    xp: Namespace,
    *arguments: Any,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Any:
    """Call a function of the task and return its result, with checks.

    Args:
        dynamics: the task.
        function: name of the function.
        xp: the namespace.
        *arguments: the other arguments, which the function must not modify.
        within: creates a context manager to call the function in.

    Raises:
        ArgumentError: the function fails, returns arrays of the wrong library, or modifies an argument.
    """
    before = _copy(arguments)
    try:
        with within():
            result = getattr(dynamics, function)(xp, *arguments)
    except RecurlError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        line = line_of(traceback.extract_tb(error.__traceback__), *_LIBRARY_FILES) or "a call of it raises"
        on = "the host" if xp is HOST else "a device"
        raise ArgumentError(
            f"{_name(dynamics)}.{function} fails on {on}, as {line}: {type(error).__name__}: {reason}. Use "
            "array operators and functions of xp, which are the same for NumPy and torch"
        ) from error
    if any(isinstance(array, Tensor) == (xp is HOST) for array in _arrays(result)):
        raise ArgumentError(
            f"{_name(dynamics)}.{function} must return arrays of xp, NumPy arrays on the host and tensors on a "
            f"device; got {_describe(result)} of another library: use functions of xp"
        )
    if not _equal(before, arguments):
        raise ArgumentError(
            f"{_name(dynamics)}.{function} must not change its arguments: return new arrays, x = x + 1 instead of "
            "x += 1, and xp.where(mask, a, b) instead of assigning to a slice"
        )
    return result


def check_memory(dynamics: Dynamics) -> None:
    """Check that the functions of a task return writable arrays that don't share memory.

    A vector environment on the host writes the initial states of new episodes into the state arrays.

    Args:
        dynamics: the task.

    Raises:
        ArgumentError: an array is read-only, or shares memory with another one.
    """
    initial = dynamics.begin(HOST, RowDraw([np.random.default_rng(TRIAL_SEED)]))
    steps = np.zeros(1, dtype=np.int64)
    actions = _zero_actions(dynamics, HOST, 1)
    first, second = (dynamics.advance(HOST, initial, steps, actions)[0] for _ in range(2))
    seen = parts(dynamics.observe(HOST, first, steps)).values()
    for name, array in first.items():
        others = [*seen, *(other for key, other in first.items() if key != name)]
        if array is not initial[name]:
            others.append(second[name])
        if not array.flags.writeable or any(np.shares_memory(array, other) for other in others):
            raise ArgumentError(
                f"every array that {_name(dynamics)} returns must be a new one, or an unchanged part of the state; "
                f"but {name!r} is read-only or shares its memory with another: copy it, for example with xp.astype"
            )


def _zero_actions(dynamics: Dynamics, xp: Namespace, rows: int) -> Any:
    """Return actions of zeros."""
    space = dynamics.action_space
    return xp.zeros((rows, *(space.shape or ())), dtype=xp.float32 if isinstance(space, Box) else xp.int64)


def _call_twice(dynamics: Dynamics, function: str, call: Callable[[], Any]) -> Any:
    """Return the result of ``call``, after checking that a second call returns the same."""
    result = call()
    if not _equal(result, call()):
        raise ArgumentError(
            f"{_name(dynamics)}.{function} must return the same for the same arguments, but a second call differed: "
            "draw all random numbers in begin, with draw, and keep no state between calls"
        )
    return result


def _equal(one: Any, other: Any) -> bool:
    """Return whether two results or arguments have the same structure and equal numbers, to rounding, NaN included."""
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Tensor | np.ndarray) and isinstance(other, Tensor | np.ndarray):
        first, second = map(torch.as_tensor, (_copy(one), _copy(other)))  # an array may be read-only
        return first.shape == second.shape and torch.allclose(first, second, rtol=_ROUNDING, atol=0.0, equal_nan=True)
    return type(one) is type(other)


def _arrays(value: Any) -> list[Any]:
    """Return all arrays in a result."""
    if isinstance(value, Mapping | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return [array for part in parts for array in _arrays(part)]
    return [value] if isinstance(value, Tensor | np.ndarray) else []


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copy(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_copy, value))
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _check_state(dynamics: Dynamics, state: Any, rows: int) -> None:
    arrays = state.values() if isinstance(state, dict) else [None]
    if not all(isinstance(array, Tensor | np.ndarray) for array in arrays):
        raise ArgumentError(f"{_name(dynamics)}.begin must return a dict of arrays; got {_describe(state)}")
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if any(shape[-1:] != (rows,) for shape in shapes.values()):
        raise ArgumentError(
            f"the last axis of every array that {_name(dynamics)}.begin returns must have one entry for each of the "
            f"{rows} rows; got shapes {shapes}"
        )


def _check_observations(dynamics: Dynamics, observations: Any, rows: int) -> None:
    spaces, found = parts(dynamics.observation_space), parts(observations)
    if spaces.keys() != found.keys():
        wanted = "one array" if "" in spaces else f"a dict with the names {sorted(spaces)}"
        raise ArgumentError(
            f"{_name(dynamics)}.observe must return {wanted}, as its observation_space; got {_describe(observations)}"
        )
    for name, space in spaces.items():
        what = f"the observations{f' {name!r}' if name else ''}"
        _check(dynamics, "observe", what, found[name], str(space.dtype), (rows, *space.shape))


def _check(dynamics: Dynamics, function: str, what: str, value: Any, kind: str, shape: tuple[int, ...]) -> None:
    got = tuple(getattr(value, "shape", ()))
    if not _kind(value).startswith(kind) or got != shape:
        raise ArgumentError(
            f"{what} of {_name(dynamics)}.{function} must be {kind} of shape {shape}; got {_kind(value)} of shape {got}"
        )


def _describe(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _describe(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_describe, value))
    return (_kind(value), tuple(value.shape)) if hasattr(value, "shape") else _kind(value)


def _kind(value: Any) -> str:
    return str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")


def _name(dynamics: Dynamics) -> str:
    return type(dynamics).__name__
