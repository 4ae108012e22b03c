"""Dynamics of a task: pure array functions, written once for NumPy arrays on the host and tensors on a device."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Self, TypeAlias, cast

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from recurl.core.errors import ArgumentError
from recurl.core.keys import ACTION_MASK
from recurl.envs.tasks.namespaces import Draw, Namespace

__all__ = ["Dynamics", "State", "check_count", "check_flag", "check_parameters", "check_state", "is_number", "parts"]

State: TypeAlias = dict[str, Any]
"""Arrays by name, with rows along the last axis."""


def check_count(name: str, value: Any, minimum: int) -> int:
    """Return `value` if it is an integer of at least `minimum`; otherwise raise an ArgumentError that names it.

    Example:
        >>> check_count("k", 4, minimum=1)
        4
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:  # NumPy's integers are Integral
        raise ArgumentError(f"{name} must be an integer of at least {minimum}; got {value!r}")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; otherwise raise an ArgumentError that names it.

    Example:
        >>> check_flag("hide_colors", False)
        False
    """
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False; got {value!r}")
    return value


def is_number(value: Any) -> bool:
    """Return whether an argument is an integer or a float, and no bool."""
    return not isinstance(value, bool) and isinstance(value, Real)


class Dynamics(ABC):
    """Base class of a task's dynamics for many rows at once: initial states, transitions, and observations.

    The three functions use array operators and the functions of the namespace `xp` passed to them, with NumPy arrays on
    the host (:class:`~recurl.envs.tasks.base.TaskVectorEnv`) or tensors on a device (:class:`~recurl.envs.TensorEnv`).
    They are pure: they don't modify their arguments, keep no state, and don't depend on values of arrays in Python
    (`if`, `float(...)`, boolean indexing), as that would synchronize with the device. Rows are independent of each
    other. All random numbers are drawn when an episode begins.

    Rows are the last axis of every state array, so that per-row numbers (`[rows]`) broadcast, and the first axis of
    actions and observations.

    Args:
        observation_space: space of one row's observation: numbers, or bits; or a Dict of such spaces by name, for
            observations of several arrays, such as ``{"observation": ..., "privileged": ...}``.
        actions: number of discrete actions; a sequence of such numbers for multi-discrete actions; or the Box of a
            continuous action.
        step_limit: number of steps after which an episode is truncated, at least 1.

    Attributes:
        parameters: the bounds, low and high, of each number that may be changed between steps, an attribute of this
            name (:meth:`~recurl.envs.EnvBase.set_parameters`). The functions see a number on the host, and a tensor
            `[rows]` on a device, so that a captured or compiled step reads its present value.
        observation_space: space of one row's observation.
        action_space: space of one row's action.
        step_limit: number of steps after which an episode is truncated.

    Raises:
        ArgumentError: an argument is invalid.
    """

    parameters: Mapping[str, tuple[float, float]] = MappingProxyType({})

    def __init__(
        self, *, observation_space: Box | MultiBinary | Dict, actions: int | Sequence[int] | Box, step_limit: int
    ) -> None:
        _check_observed(type(self).__name__, observation_space)
        self.observation_space = observation_space
        self.action_space = _action_space(actions)
        self.step_limit = check_count("step_limit", step_limit, minimum=1)

    def get_parameters(self) -> dict[str, Any]:
        """Return the present values of the parameters, by name."""
        return {name: getattr(self, name) for name in self.parameters}

    def with_parameters(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with other values of parameters, unchecked; see :func:`check_parameters`."""
        found = copy.copy(self)
        for name, value in values.items():
            setattr(found, name, value)
        return found

    @abstractmethod
    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Return the initial state of rows that begin an episode.

        Args:
            xp: the namespace.
            draw: source of random numbers, which also determines the number of rows.
        """

    def begin_again(self, xp: Namespace, draw: Draw, state: State) -> State:
        """Return the initial state of rows that begin the next episode of a trial (:class:`~recurl.envs.Trials`).

        By default, that of any episode. Override it to keep what the episodes of a trial share, such as a goal.

        Args:
            xp: the namespace.
            draw: source of random numbers.
            state: initial state of the previous episode.
        """
        del state
        return self.begin(xp, draw)

    @abstractmethod
    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Return the state after a step, its reward `[rows]` and `terminated`, bool `[rows]`, as new arrays.

        Ignore the step limit, which the environment handles. Don't raise for rows whose episode has ended: they may be
        stepped, and the result is discarded.

        Args:
            xp: the namespace.
            state: state arrays as returned by :meth:`begin` or this function; unchanged ones may be returned as they
                are.
            steps: number of previous steps in each row's episode, int64 `[rows]`.
            actions: integers `[rows]`, or `[rows, n]` for multi-discrete actions; or real vectors `[rows, n]`.
        """

    @abstractmethod
    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the observations of a state, `[rows, ...]` of the space's dtype, as a new array (see `xp.astype`).

        For a Dict space, return a dict of such arrays with the same names.

        Args:
            xp: the namespace.
            state: the state.
            steps: number of steps in each row's episode, int64 `[rows]`.
        """


def check_parameters(dynamics: Dynamics, values: Mapping[str, Any]) -> None:
    """Check new values of parameters.

    Raises:
        ArgumentError: the task has no such parameter, or a value is out of bounds.
    """
    for name, value in values.items():
        if name not in dynamics.parameters:
            has = ", ".join(dynamics.parameters) or "none"
            raise ArgumentError(f"{type(dynamics).__name__} has no parameter {name}: it has {has}.")
        low, high = dynamics.parameters[name]
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ArgumentError(f"{name} must be a number from {low:g} to {high:g}; got {value!r}")


def parts(observation: Any) -> dict[str, Any]:
    """Return the parts of an observation, or of its space, by name; a single one is named ``""``.

    Example:
        >>> list(parts(Box(0, 1))), list(parts(Dict(a=Box(0, 1), b=MultiBinary(2))))
        ([''], ['a', 'b'])
    """
    return {**observation} if isinstance(observation, Mapping | Dict) else {"": observation}


def _check_observed(owner: str, space: Any) -> None:
    found = parts(space)
    if not found or not all(isinstance(part, Box | MultiBinary) for part in found.values()):
        raise ArgumentError(
            f"the observation_space of {owner} must be a Box or MultiBinary, one array, or a flat Dict of these; got "
            f"{space}: concatenate what belongs together into one array"
        )
    if ACTION_MASK in found:
        raise ArgumentError(f"an observation of {owner} can't be named {ACTION_MASK!r}: a task has no action masks")


def _action_space(actions: Any) -> Discrete | MultiDiscrete | Box:
    if isinstance(actions, Box):
        return actions
    several = isinstance(actions, Sequence) and not isinstance(actions, str)
    numbers: list[Any] = list(cast(Sequence[Any], actions)) if several else [actions]
    if not numbers or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in numbers):
        raise ArgumentError(
            "actions must be the number of actions, such as 3; a list of such numbers for multi-discrete actions; or "
            f"the Box of a continuous action; got {actions!r}"
        )
    counts = [int(number) for number in numbers]
    return MultiDiscrete(counts) if several else Discrete(counts[0])


def check_state(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ArgumentError unless `state` has exactly the given entries and shapes (a list has shape `(n,)`)."""
    got = {name: (len(value),) if isinstance(value, list) else tuple(np.shape(value)) for name, value in state.items()}
    if got != dict(shapes):
        raise ArgumentError(
            f"the state must come from an environment built with the same arguments: entries {dict(shapes)}; got {got}"
        )
