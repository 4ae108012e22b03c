"""In-place collection: environment steps written directly into batch memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recurl.core.keys import DONE, DONE_KEYS, REWARD, TERMINATED, TRUNCATED, path_of
from recurl.envs.gym_spaces import ObservationReader
from recurl.execution.explain import NotCompiled
from recurl.transforms.base import Constant, Transform, constants_of

__all__ = ["InPlace"]

Path: TypeAlias = tuple[str, ...]
_Array: TypeAlias = NDArray[Any]
_Rows: TypeAlias = NDArray[np.bool_]


class InPlace:
    """In-place stepper: writes the steps and resets of a Gymnasium environment into arrays.

    Args:
        advance: takes a step, given the action and the arrays of the flags; returns observation, reward, info, and
            whether any row is done.
        checked: validates a named result of a step, such as the reward, and returns it as an array with one value per
            row.
        restart: resets the given rows, or all rows for None; returns observation and info.
        observations: converter of observations.
        batched: whether there is a batch dimension.

    Attributes:
        constants: entries of the root that have one constant value in rows that are reset, and another value, or the
            one written by the policy, after a step.
    """

    def __init__(
        self,
        advance: Callable[..., tuple[Any, Any, Any, bool]],
        checked: Callable[[str, Any], _Array],
        restart: Callable[[_Rows | None], tuple[Any, Any]],
        observations: ObservationReader,
        batched: bool,
    ) -> None:
        self._advance, self._per_row, self._restart = advance, checked, restart
        self._observations, self._batched = observations, batched
        self._observed = [path_of(key) for key in observations.spec.keys(True, True)]
        self.constants = {path_of(key): Constant(key, False, False) for key in DONE_KEYS}

    def add(self, transform: Transform) -> None:
        """Add the entries of a transform.

        Raises:
            NotCompiled: they can't be written in place; the message is the reason.
        """
        constants = constants_of(transform)
        if constants is None:
            raise NotCompiled(f"{transform} sets more than constants")
        found = {path_of(constant.key): constant for constant in constants}
        conflicts = found.keys() & {*self._observed, *((key,) for key in (*DONE_KEYS, REWARD))}
        if conflicts:
            raise NotCompiled(f"{transform} sets {sorted(conflicts)} of the environment")
        self.constants.update(found)

    @property
    def roots(self) -> list[Path]:
        """Paths of the entries of a root."""
        return [*self._observed, *self.constants]

    @property
    def after(self) -> list[Path]:
        """Paths of the entries under ``next`` that a step writes, including constants."""
        constants = [path for path, constant in self.constants.items() if constant.after_step is not None]
        return [*self._observed, (REWARD,), *constants]

    def begin(self, actions: _Array | Tensor, after: Mapping[Path, _Array]) -> None:
        """Set the batch memory to work on, arrays ``[T, *B, ...]``.

        Args:
            actions: actions to read.
            after: entries under ``next`` to write.
        """
        self._actions = actions
        self._observation_memory = [after[path] for path in self._observed]
        numbers = (after[key,] for key in (TERMINATED, TRUNCATED, DONE, REWARD))
        self._terminated, self._truncated, self._done, self._reward = (
            array[..., 0] if self._batched else array for array in numbers
        )

    def step(self, step: int) -> bool:
        """Take and write step ``step`` of the batch, and return whether any row is done."""
        observation, reward, _, any_done = self._advance(
            self._actions[step, ...], self._terminated[step], self._truncated[step], self._done[step]
        )
        self._observations.read_into(self._observation_memory, step, observation)
        self._reward[step] = self._per_row(REWARD, reward)
        return any_done

    def reset(self, step: int, root: Mapping[Path, _Array]) -> None:
        """Reset the rows that are done after a step, and write their entries that differ from those after a step.

        Args:
            step: index of the step.
            root: entries of the root after the step, ``[*B, ...]`` each.
        """
        rows = self._done[step].copy() if self._batched else None
        found = self._observations.read(self._restart(rows)[0])
        where: Any = ...
        if rows is not None:
            where = np.flatnonzero(rows)
            where = where if len(where) > 1 else int(where[0])  # an integer index is faster for a single row
        for key, value in found.items():
            root[path_of(key)][where] = value.numpy()[where]
        for path, constant in self.constants.items():
            if constant.at_reset != constant.after_step:
                root[path][where] = constant.at_reset
