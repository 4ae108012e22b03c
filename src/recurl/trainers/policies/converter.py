"""Observations from NumPy to tensors and actions back, for one environment or for several."""

from __future__ import annotations

from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from torch import Tensor

from recurl.envs import ActionReader, MaskReader, ObservationReader
from recurl.envs.gym_spaces import brief
from recurl.errors import ArgumentError, NonFiniteError
from recurl.keys import ACTION_MASK, NestedKey

Batch: TypeAlias = tuple[int, ...]
"""``()`` for one environment, ``(n,)`` for several."""


class Converter:
    """Converts by the spaces of an environment, whose readers it takes.

    Args:
        observations: reads observations.
        actions: reads actions.
        mask_path: where the observation may have an action mask.

    Attributes:
        observation_space: observations of one environment.
        action_space: actions of one environment.
        action_spec: likewise, of the tensors.
        mask_path: see above.
    """

    def __init__(
        self, observations: ObservationReader, actions: ActionReader, mask_path: tuple[str, ...] = (ACTION_MASK,)
    ) -> None:
        self.observation_space = observations.space
        self.action_space = actions.space
        self.action_spec = actions.spec
        self.mask_path = mask_path
        self._readers = {(): (observations.rebatched(()), actions.rebatched(()))}

    def observe(self, observation: Any) -> tuple[Batch, dict[NestedKey, Tensor]]:
        """Return whether ``observation`` is one or a batch, and its entries with a batch dimension, ``[n, ...]``.

        Raises:
            ArgumentError: it is neither.
            NonFiniteError: a number in it isn't finite.
        """
        try:
            batch = _batch_of(self.observation_space, observation)
            entries = self._of(batch)[0].read(observation)
        except (ArgumentError, LookupError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"predict takes an observation in {self.observation_space}, or a batch of them along a new first "
                f"dimension: {error}"
            ) from error
        for key, value in entries.items():
            if value.is_floating_point() and not np.isfinite(value.numpy()).all():
                raise NonFiniteError(f"An observation must be finite, but {key!r} holds NaN or infinity.")
        return batch, entries if batch else {key: value.unsqueeze(0) for key, value in entries.items()}

    def mask(self, mask: Any, batch: Batch) -> Tensor:
        """Return an action mask, in one piece or in parts, as bools ``[n, choices]``.

        Raises:
            ArgumentError: it is none for this action and batch.
        """
        reader = MaskReader(self.mask_path, "observation", self.action_spec, batch, self.action_space)
        try:
            found = reader.convert(mask)
        except ArgumentError as error:
            shape = np.shape(mask) if isinstance(mask, np.ndarray) else None
            raise ArgumentError(
                f"action_mask must hold 0 and 1, or bools, of shape {[*batch, *reader.spec.shape]}, or be a tuple or "
                f"dict of one for each part of the action, got {brief(mask) if shape is None else list(shape)}."
            ) from error
        return found if batch else found.unsqueeze(0)

    def act(self, action: Any, batch: Batch) -> Any:
        """Return actions ``[n, ...]``, tensors or TensorDicts, as those of the environment, in NumPy."""
        found = self._of(batch)[1].read(action if batch else action[0])
        return np.int64(found) if isinstance(found, int) else found

    def _of(self, batch: Batch) -> tuple[ObservationReader, ActionReader]:
        if batch not in self._readers:
            if batch == (0,):
                raise ArgumentError("a batch must have at least one row, got none")
            observations, actions = self._readers[()]
            # One batch size at a time: those of a program that varies them would pile up.
            self._readers = {
                (): (observations, actions),
                batch: (observations.rebatched(batch), actions.rebatched(batch)),
            }
        return self._readers[batch]


def _batch_of(space: gym.Space[Any], observation: Any) -> Batch:
    """Return ``()`` if ``observation`` has the dimensions of one in ``space``, ``(n,)`` if it has one more."""
    while isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts: Any = space.spaces
        # Any part with a shape will do: texts and graphs have none.
        items = parts.items() if isinstance(parts, dict) else enumerate(parts)
        name, space = next((item for item in items if _has_shape(item[1])), next(iter(items)))
        observation = observation[name]
    one = len(space.shape or ())
    shape = np.shape(observation)
    if len(shape) not in (one, one + 1):
        raise ArgumentError(f"it must have {one} dimensions, or {one + 1} for a batch, got shape {list(shape)}")
    return () if len(shape) == one else (shape[0],)


def _has_shape(space: gym.Space[Any]) -> bool:
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts: Any = space.spaces
        return any(map(_has_shape, parts.values() if isinstance(parts, dict) else parts))
    return space.shape is not None
