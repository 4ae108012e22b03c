"""Low-latency inference for one environment with NumPy arrays."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import IS_INIT, NestedKey, dotted, path_of
from recurl.trainers.policies.converter import Converter
from recurl.trainers.policies.steps import PolicyStep

__all__ = ["CompiledPolicy"]


class CompiledPolicy:
    """Greedy policy for one environment that computes each step in one call of the C++ library.

    It matches :meth:`Policy.predict` up to rounding but skips its checks: observations are not checked for NaN or
    infinity. Not thread-safe.

    Args:
        step: the step function of the policy.
        converter: converts observations and actions.

    Raises:
        UnsupportedError: the policy can't be compiled into one call, or its only observation isn't a single Box.
    """

    def __init__(self, step: PolicyStep, converter: Converter) -> None:
        keys, function = step.compiled()
        self.observation_space: gym.Space[Any] = converter.observation_space
        self.action_space: gym.Space[Any] = converter.action_space
        self._start = np.zeros(1, np.bool_)  # used if the policy has no memory
        self._shape = _checked_shape(converter, keys, step.states)
        self._row = function.one_row()
        self._run = self._row.run
        arrays = dict(zip(keys, self._row.inputs, strict=True))
        self._states = [(dotted(key), arrays[key]) for key in step.states]
        self._observation = next(array for key, array in arrays.items() if key != IS_INIT and key not in step.states)
        self._start = arrays.get(IS_INIT, self._start).reshape(1)
        self._action, *after = self._row.outputs
        self._after = list(zip(map(dotted, step.states), after, strict=True))
        space = converter.action_space
        self._dtype = space.dtype
        self._first = int(space.start) if isinstance(space, gym.spaces.Discrete) else None

    def __call__(
        self, observation: NDArray[Any], state: dict[str, NDArray[Any]] | None = None, episode_start: bool = False
    ) -> tuple[Any, dict[str, NDArray[Any]]]:
        """Choose the action of one step.

        Args:
            observation: an array with the shape of the observation space, or of the only entry that is read of a
                ``Dict``.
            state: the state returned by the previous call; None at the start of an episode.
            episode_start: whether to reset the state.

        Returns:
            The action, as ``env.step`` expects it, and the new state.

        Raises:
            ArgumentError: ``observation`` has another shape, or ``state`` was not returned by a call.
        """
        if observation.shape != self._shape:
            raise ArgumentError(f"observation must have shape {list(self._shape)}, got {list(observation.shape)}.")
        self._observation[...] = observation
        self._start[0] = episode_start or state is None
        if state is not None:
            try:
                for name, own in self._states:
                    own[...] = state[name]
            except (LookupError, TypeError, ValueError) as error:
                raise ArgumentError(f"state must be the state returned by the last call: {error}") from error
        self._run()
        after = {name: array.copy() for name, array in self._after}
        return self._action.astype(self._dtype) if self._first is None else self._action + self._first, after


def _checked_shape(converter: Converter, keys: list[NestedKey], states: list[NestedKey]) -> tuple[int, ...]:
    """Return the observation shape; raise if the policy reads anything but one Box."""
    observed = [key for key in keys if key != IS_INIT and key not in states]
    space = converter.observation_space
    for name in path_of(observed[0]) if len(observed) == 1 else ():
        space = space[name] if isinstance(space, gym.spaces.Dict) else space
    if len(observed) != 1 or not isinstance(space, gym.spaces.Box):
        raise UnsupportedError(
            f"A compiled policy must read a single Box, but this one reads {observed} of {space}: use predict."
        )
    return space.shape
