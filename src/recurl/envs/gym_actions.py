"""Conversion of action tensors to Gymnasium actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import ACTION, NestedKey
from recurl.core.specs import Binary, Categorical, Composite, MultiCategorical, OneHot, TensorSpec
from recurl.envs.gym_spaces import box_spec
from recurl.envs.space_json import space_from_json, space_to_json

__all__ = ["ActionReader"]

spaces = gym.spaces
_SMALL_BATCH = 32
_INT64 = np.dtype(np.int64)


class ActionReader:
    """Converter from action tensors or arrays to Gymnasium actions, which raises for invalid ones.

    A ``Discrete`` action is read as an integer of shape ``[*B]`` or as a one-hot vector ``[*B, n]``, depending on its
    shape and not on the spec. A ``Dict`` of actions is a TensorDict with an entry for each name; a ``Tuple`` has the
    entries ``"0"``, ``"1"``, and so on. Integers thus stay integers next to real numbers, and each part can be read,
    replayed, and exported by name, as with TorchRL's composite specs. The log-probability is the joint one.

    Args:
        space: action space of one environment.
        batch_size: ``[]`` or ``[n]``.
        categorical: use the spec :class:`Categorical` for a ``Discrete`` space instead of :class:`OneHot`.
        key: key of the action, for error messages.

    Attributes:
        space: the space.
        spec: action spec of one environment.

    Raises:
        UnsupportedError: the space has no tensor equivalent (``Text``, ``Graph``, ``Sequence``), or is empty.
    """

    def __init__(
        self, space: gym.Space[Any], batch_size: Sequence[int], categorical: bool, key: NestedKey = ACTION
    ) -> None:
        self.space = space
        self._batch = tuple(batch_size)
        self._categorical = categorical
        self._key = key
        self.spec: TensorSpec
        self.read = self._box
        if isinstance(space, spaces.Dict | spaces.Tuple):
            self._set_parts(space, categorical)
            return
        if isinstance(space, spaces.Discrete):
            self._n, self._start = int(space.n), int(space.start)
            self.spec = Categorical(self._n) if categorical else OneHot(self._n)
            self.read = self._discrete
        elif isinstance(space, spaces.MultiDiscrete):
            self._limits = space.nvec
            self._starts = space.start
            self.spec = MultiCategorical(space.nvec.tolist())
            self.read = self._multi
        elif isinstance(space, spaces.MultiBinary):
            self._limits, self._starts = np.full(space.shape, 2), np.zeros(space.shape, np.int8)
            self.spec = Binary(space.shape, dtype=torch.int8)
            self.read = self._multi
        elif isinstance(space, spaces.Box):
            self.spec = box_spec(space)
        else:
            raise UnsupportedError(
                f"The action space must be Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of "
                f"these, got {space} for {key!r}: wrap the environment to provide one of these."
            )
        self._shape = (*self._batch, *self.spec.shape)
        self._dtype = space.dtype

    def rebatched(self, batch_size: Sequence[int]) -> ActionReader:
        """Return an equal reader for another batch size."""
        return ActionReader(self.space, batch_size, self._categorical, self._key)

    def to_json(self) -> dict[str, Any]:
        """Return plain values from which :meth:`from_json` builds an equal reader."""
        return {"space": space_to_json(self.space), "categorical": self._categorical}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], batch_size: Sequence[int]) -> ActionReader:
        """Build a reader from the result of :meth:`to_json`."""
        return cls(space_from_json(values["space"]), batch_size, values["categorical"])

    def _set_parts(self, space: spaces.Dict | spaces.Tuple, categorical: bool) -> None:
        named = isinstance(space, spaces.Dict)
        children = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
        if not children:
            raise UnsupportedError(f"The action space of {self._key!r} must not be empty, got {space}.")
        prefix = (self._key,) if isinstance(self._key, str) else self._key
        readers = {
            str(name): ActionReader(child, self._batch, categorical, (*prefix, str(name)))
            for name, child in children.items()
        }
        self.spec = Composite({name: reader.spec for name, reader in readers.items()})

        def read(action: Any) -> Any:
            if isinstance(action, torch.Tensor) or any(name not in action for name in readers):
                got = "a tensor" if isinstance(action, torch.Tensor) else str(sorted(map(str, action.keys())))
                raise ArgumentError(f"The action {self._key!r} must have the entries {list(readers)}, got {got}.")
            parts = {name: reader.read(action[name]) for name, reader in readers.items()}
            return parts if named else tuple(parts.values())

        self.read = read

    def _discrete(self, action: Any) -> Any:
        values = action if type(action) is np.ndarray else self._numpy(action)
        if values.shape == self._batch and values.dtype.kind in "iu":
            index = values
            if values.size < _SMALL_BATCH:
                listed = sorted(values.tolist()) if self._batch else [values.item()]  # faster than NumPy
                valid = listed[0] >= 0 and listed[-1] < self._n
            else:
                valid = bool(values.min() >= 0 and values.max() < self._n)
        elif values.shape == (*self._batch, self._n):
            index = values.argmax(-1)
            valid = bool((values.sum(-1) == 1).all() and ((values == 0) | (values == 1)).all())
        else:
            valid, index = False, values
        if not valid:
            action = torch.as_tensor(action)
            raise ArgumentError(
                f"A discrete action must be an integer in [0, {self._n}) of shape {list(self._batch)}, or one-hot of "
                f"shape {[*self._batch, self._n]}, got {action.dtype} of shape {list(action.shape)}: {action}."
            )
        if not self._batch:
            return int(index) + self._start
        chosen = index.copy() if index.dtype is _INT64 else index.astype(np.int64)
        if self._start:
            chosen += self._start
        return chosen

    def _multi(self, action: Any) -> Any:
        values = self._numpy(action)
        fits = values.shape == self._shape and values.dtype.kind in "iub"
        if not fits or bool((values < 0).any() or (values >= self._limits).any()):
            action = torch.as_tensor(action)
            raise ArgumentError(
                f"The action must hold integers in [0, {self._limits.tolist()}) and have shape {list(self._shape)}, "
                f"got {action.dtype} of shape {list(action.shape)}: {action}."
            )
        return (values + self._starts).astype(self._dtype)

    def _box(self, action: Any) -> Any:
        values = self._numpy(action)
        if values.shape != self._shape or (
            values.dtype.kind != "f" and self.spec.dtype != torch.as_tensor(action).dtype
        ):
            action = torch.as_tensor(action)
            raise ArgumentError(
                f"The action must be {self.spec.dtype} of shape {list(self._shape)}, "
                f"got {action.dtype} of shape {list(action.shape)}."
            )
        return values.astype(self._dtype)

    def _numpy(self, action: Any) -> np.ndarray[Any, Any]:
        if type(action) is np.ndarray:
            return action
        if isinstance(action, torch.Tensor):
            return action.numpy(force=True)
        got = sorted(map(str, cast("Mapping[Any, Any]", action).keys())) if hasattr(action, "keys") else repr(action)
        raise ArgumentError(f"The action {self._key!r} must be a tensor that fits {self.spec}, got entries {got}.")
