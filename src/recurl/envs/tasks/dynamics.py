"""Dynamics of a task: pure functions of arrays, written once for NumPy arrays on the host and tensors on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.errors import ArgumentError

__all__ = ["Dynamics", "State", "check_count", "check_state"]

State: TypeAlias = dict[str, Any]
"""Arrays by name; the last axis of each counts the rows."""


def check_count(name: str, value: Any, minimum: int) -> int:
    """Return `value`, an integer of at least `minimum`, or raise ArgumentError naming it.

    Example:
        >>> check_count("k", 4, minimum=1)
        4
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ArgumentError(f"{name} must be an integer of at least {minimum}; got {value!r}")
    return value


class Dynamics(ABC):
    """What a task does, for many rows at once: how episodes begin, go on and look.

    The three functions use the operators of arrays and the functions of the namespace `xp` that they are given: NumPy
    arrays on the host (:class:`~recurl.envs.tasks.base.TaskVectorEnv`), or tensors on a device
    (:class:`~recurl.envs.TensorEnv`). They are pure: they change none of their arguments, keep nothing, and don't ask
    for the values in an array (`if`, `float(...)`, masks as an index), as that would wait for the device. Rows are
    independent of each other. All randomness is drawn when an episode begins.

    Rows are the last axis of every array of the state, so that numbers per row (`[rows]`) broadcast, and the first axis
    of actions and observations.

    Args:
        observation_space: space of one row's observation: numbers, or bits.
        actions: number of discrete actions; or a sequence of such numbers, where an action chooses several things at
            once; or the Box of one continuous action.
        step_limit: steps after which an episode is truncated, at least 1.

    Attributes:
        observation_space: space of one row's observation.
        action_space: space of one row's action.
        step_limit: steps after which an episode is truncated.

    Raises:
        ArgumentError: an argument is none of these.
    """

    def __init__(
        self, *, observation_space: Box | MultiBinary, actions: int | Sequence[int] | Box, step_limit: int
    ) -> None:
        if not isinstance(observation_space, Box | MultiBinary):  # type: ignore[reportUnnecessaryIsInstance] # users
            raise ArgumentError(
                f"the observation_space of {type(self).__name__} must be a Box or MultiBinary, one array; got "
                f"{observation_space}: put several parts into one array, one after the other"
            )
        self.observation_space = observation_space
        self.action_space = _action_space(actions)
        self.step_limit = check_count("step_limit", step_limit, minimum=1)

    @abstractmethod
    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Return the state of rows that begin an episode.

        Args:
            xp: the namespace.
            draw: their random numbers; the only way to learn how many rows there are.
        """

    @abstractmethod
    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Return the state after a step, its reward `[rows]` and `terminated`, bool `[rows]`, as new arrays.

        The step limit is not this function's business. It must not raise for rows whose episode has ended: they may be
        stepped, and the result dropped.

        Args:
            xp: the namespace.
            state: arrays as :meth:`begin` or this function returned them; one that stays the same may be returned.
            steps: steps that each row has made in its episode, without this one, int64 `[rows]`.
            actions: integers `[rows]`, or `[rows, n]` where an action chooses several things; or real vectors
                `[rows, n]`.
        """

    @abstractmethod
    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the observations of a state, `[rows, ...]` of the space's dtype; a new array, as `xp.astype` makes.

        Args:
            xp: the namespace.
            state: the state.
            steps: steps that each row has made in its episode, int64 `[rows]`.
        """


def _action_space(actions: Any) -> Discrete | MultiDiscrete | Box:
    if isinstance(actions, Box):
        return actions
    several = isinstance(actions, Sequence) and not isinstance(actions, str)
    numbers: list[Any] = list(cast(Sequence[Any], actions)) if several else [actions]
    if not numbers or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in numbers):
        raise ArgumentError(
            "actions must be how many there are, such as 3; a list of such numbers, where an action chooses several "
            f"things; or the Box of a real action; got {actions!r}"
        )
    counts = [int(number) for number in numbers]
    return MultiDiscrete(counts) if several else Discrete(counts[0])


def check_state(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ArgumentError unless `state` has exactly these entries with these shapes (the shape of a list: `(n,)`)."""
    came = {name: (len(value),) if isinstance(value, list) else tuple(np.shape(value)) for name, value in state.items()}
    if came != dict(shapes):
        raise ArgumentError(
            f"the state must come from an environment built with the same arguments: entries {dict(shapes)}; got {came}"
        )
