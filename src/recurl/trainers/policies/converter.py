"""Conversion of observations from NumPy to tensors and of actions back, single or batched."""

from __future__ import annotations

from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from torch import Tensor

from recurl.core.errors import ArgumentError, NonFiniteError
from recurl.core.keys import ACTION_MASK, NestedKey
from recurl.envs import ActionReader, MaskReader, ObservationReader
from recurl.envs.gym_spaces import brief

Batch: TypeAlias = tuple[int, ...]
"""``()`` for one environment, ``(n,)`` for several."""


class Converter:
    """Converter between NumPy values in the spaces of an environment and tensors.

    Args:
        observations: reader of observations.
        actions: reader of actions.
        mask_path: path of the action mask in an observation, if it has one.

    Attributes:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        action_spec: spec of the action tensors of one environment.
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
        """Return the batch shape of ``observation`` and its entries with a batch dimension, ``[n, ...]``.

        Raises:
            ArgumentError: it is neither a single observation nor a batch.
            NonFiniteError: it contains NaN or infinity.
        """
        try:
            batch = _batch_of(self.observation_space, observation)
            entries = self._readers_for(batch)[0].read(observation)
        except (ArgumentError, LookupError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"predict takes an observation in {self.observation_space}, or a batch of them with a leading batch "
                f"dimension: {error}"
            ) from error
        for key, value in entries.items():
            if value.is_floating_point() and not np.isfinite(value.numpy()).all():
                raise NonFiniteError(f"An observation must be finite, but {key!r} holds NaN or infinity.")
        return batch, entries if batch else {key: value.unsqueeze(0) for key, value in entries.items()}

    def mask(self, mask: Any, batch: Batch) -> Tensor:
        """Return an action mask, given whole or as parts, as bools ``[n, choices]``.

        Raises:
            ArgumentError: it doesn't fit the action and the batch.
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
        """Convert actions ``[n, ...]``, a tensor or a TensorDict, to the NumPy actions of the environment."""
        found = self._readers_for(batch)[1].read(action if batch else action[0])
        return np.int64(found) if isinstance(found, int) else found

    def _readers_for(self, batch: Batch) -> tuple[ObservationReader, ActionReader]:
        if batch not in self._readers:
            if batch == (0,):
                raise ArgumentError("a batch must have at least one row, got none")
            observations, actions = self._readers[()]
            # Cache one batch size only, so that a caller with varying sizes doesn't accumulate readers.
            self._readers = {
                (): (observations, actions),
                batch: (observations.rebatched(batch), actions.rebatched(batch)),
            }
        return self._readers[batch]


def _batch_of(space: gym.Space[Any], observation: Any) -> Batch:
    """Return ``()`` if ``observation`` has as many dimensions as ``space``, ``(n,)`` if it has one more."""
    while isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts: Any = space.spaces
        # Any part with a shape determines the batch; texts and graphs have none.
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
