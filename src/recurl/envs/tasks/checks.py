"""Checks of a task's functions: of the right shapes and dtypes, pure, in memory of their own."""

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

from recurl.envs.tasks.dynamics import Dynamics, State
from recurl.envs.tasks.namespaces import HOST, Draw, Namespace, RowDraw
from recurl.errors import ArgumentError, RecurlError
from recurl.seeding import derive_seed
from recurl.source_lines import line_of

__all__ = ["TRIAL_SEED", "called", "check_memory", "check_step"]

TRIAL_SEED = derive_seed(0, "trial of the dynamics")
"""Seed of the random numbers that a task is checked with, which are drawn again for each call."""
_OWN = tuple(str(Path(__file__).with_name(name)) for name in ("checks.py", "namespaces.py", "tensor_functions.py"))
_ROUNDING = 1e-5  # that sums on a GPU may differ by from call to call


def check_step(dynamics: Dynamics, xp: Namespace, make_draw: Callable[[], Draw], rows: int) -> State:
    """Begin an episode, play a step, and return the state at the beginning; refuse functions that break the rules.

    Each is called twice: it must return the same, and leave its arguments as they were.

    Args:
        dynamics: the task.
        xp: the namespace.
        make_draw: makes a source of random numbers of `rows` rows, the same ones each time.
        rows: number of rows.

    Raises:
        ArgumentError: a function fails, returns something else than it should, or isn't pure.
    """
    begun = _pure(dynamics, "begin", lambda: called(dynamics, "begin", xp, make_draw()))
    _check_state(dynamics, begun, rows)
    steps, seen = xp.zeros(rows, dtype=xp.int64), dynamics.observation_space
    observations = _pure(dynamics, "observe", lambda: called(dynamics, "observe", xp, begun, steps))
    _check(dynamics, "observe", "the observations", observations, str(seen.dtype), (rows, *seen.shape))
    actions = _no_actions(dynamics, xp, rows)
    result = _pure(dynamics, "advance", lambda: called(dynamics, "advance", xp, begun, steps, actions))
    if not isinstance(result, tuple) or len(result) != 3:
        raise ArgumentError(
            f"{_name(dynamics)}.advance must return the state, the rewards and terminated; got {_described(result)}"
        )
    state, reward, terminated = result
    _check(dynamics, "advance", "the rewards", reward, "float", (rows,))
    _check(dynamics, "advance", "terminated", terminated, "bool", (rows,))
    found = _described(state)
    if found != _described(begun):
        raise ArgumentError(
            f"{_name(dynamics)}.advance must return a state like the one it got, {_described(begun)}; got {found}"
        )
    return begun


def called(
    dynamics: Dynamics,
    function: str,
    xp: Namespace,
    *arguments: Any,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Any:
    """Return what a function of the task returns.

    Args:
        dynamics: the task.
        function: its name.
        xp: the namespace.
        *arguments: the other arguments; it must not change them.
        within: makes a context to call it in.

    Raises:
        ArgumentError: it fails, or changes an argument.
    """
    before = _copied(arguments)
    try:
        with within():
            result = getattr(dynamics, function)(xp, *arguments)
    except RecurlError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        line = line_of(traceback.extract_tb(error.__traceback__), *_OWN) or "a call of it raises"
        on = "the host" if xp is HOST else "a device"
        raise ArgumentError(
            f"{_name(dynamics)}.{function} fails on {on}, as {line}: {type(error).__name__}: {said}. Take "
            "operators of arrays and functions of xp, which are the same for NumPy and torch"
        ) from error
    if any(isinstance(array, Tensor) == (xp is HOST) for array in _arrays(result)):
        raise ArgumentError(
            f"{_name(dynamics)}.{function} must return arrays as xp makes them, NumPy's on the host and tensors on a "
            f"device; got {_described(result)} of another library: take functions of xp"
        )
    if not _same(before, arguments):
        raise ArgumentError(
            f"{_name(dynamics)}.{function} must not change its arguments: return new arrays, x = x + 1 instead of "
            "x += 1, and xp.where(mask, a, b) instead of an assignment to a part"
        )
    return result


def check_memory(dynamics: Dynamics) -> None:
    """Refuse functions that return arrays which must not be written to, or which are part of each other.

    A vector environment on the host writes the beginnings of new episodes into the arrays of the state.

    Args:
        dynamics: the task.

    Raises:
        ArgumentError: an array is not new, or read-only.
    """
    begun = dynamics.begin(HOST, RowDraw([np.random.default_rng(TRIAL_SEED)]))
    steps = np.zeros(1, dtype=np.int64)
    actions = _no_actions(dynamics, HOST, 1)
    first, second = (dynamics.advance(HOST, begun, steps, actions)[0] for _ in range(2))
    seen = dynamics.observe(HOST, first, steps)
    for name, array in first.items():
        others = [seen, *(other for key, other in first.items() if key != name)]
        if array is not begun[name]:
            others.append(second[name])
        if not array.flags.writeable or any(np.shares_memory(array, other) for other in others):
            raise ArgumentError(
                f"every array that {_name(dynamics)} returns must be a new one, or part of the state that stays the "
                f"same; but {name!r} shares its memory with another: copy it, as xp.astype does"
            )


def _no_actions(dynamics: Dynamics, xp: Namespace, rows: int) -> Any:
    """Return actions of zeros."""
    space = dynamics.action_space
    return xp.zeros((rows, *(space.shape or ())), dtype=xp.float32 if isinstance(space, Box) else xp.int64)


def _pure(dynamics: Dynamics, function: str, call: Callable[[], Any]) -> Any:
    """Return a result that is the same when it is asked for again."""
    result = call()
    if not _same(result, call()):
        raise ArgumentError(
            f"{_name(dynamics)}.{function} must return the same for the same arguments, but a second call differed: "
            "draw all random numbers in begin, by draw, and keep nothing from one call to the next"
        )
    return result


def _same(one: Any, other: Any) -> bool:
    """Return whether two results or arguments are of one kind and, to rounding, have equal numbers, NaN included."""
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor | np.ndarray) and isinstance(other, Tensor | np.ndarray):
        first, second = map(torch.as_tensor, (_copied(one), _copied(other)))  # an array may be read-only
        return first.shape == second.shape and torch.allclose(first, second, rtol=_ROUNDING, atol=0.0, equal_nan=True)
    return type(one) is type(other)


def _arrays(value: Any) -> list[Any]:
    """Return all arrays in a result."""
    if isinstance(value, Mapping | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return [array for part in parts for array in _arrays(part)]
    return [value] if isinstance(value, Tensor | np.ndarray) else []


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _check_state(dynamics: Dynamics, state: Any, rows: int) -> None:
    arrays = state.values() if isinstance(state, dict) else [None]
    if not all(isinstance(array, Tensor | np.ndarray) for array in arrays):
        raise ArgumentError(f"{_name(dynamics)}.begin must return a dict of arrays; got {_described(state)}")
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if any(shape[-1:] != (rows,) for shape in shapes.values()):
        raise ArgumentError(
            f"the last axis of every array that {_name(dynamics)}.begin returns must count the {rows} rows; got "
            f"shapes {shapes}"
        )


def _check(dynamics: Dynamics, function: str, what: str, value: Any, kind: str, shape: tuple[int, ...]) -> None:
    came = tuple(getattr(value, "shape", ()))
    if not _kind(value).startswith(kind) or came != shape:
        raise ArgumentError(
            f"{what} of {_name(dynamics)}.{function} must be {kind} of shape {shape}; got {_kind(value)} of shape "
            f"{came}"
        )


def _described(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _described(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_described, value))
    return (_kind(value), tuple(value.shape)) if hasattr(value, "shape") else _kind(value)


def _kind(value: Any) -> str:
    return str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")


def _name(dynamics: Dynamics) -> str:
    return type(dynamics).__name__
