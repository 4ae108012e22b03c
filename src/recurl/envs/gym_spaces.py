"""Conversion of Gymnasium spaces to specs, and of action tensors to Gymnasium actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch

from recurl.errors import ArgumentError, UnsupportedError
from recurl.specs import Binary, Bounded, Categorical, MultiCategorical, OneHot, TensorSpec, Unbounded

__all__ = ["ActionReader", "box_spec", "brief", "numpy_dtype"]

spaces = gym.spaces


class ActionReader:
    """Converts action tensors to Gymnasium actions, and refuses invalid ones.

    A ``Discrete`` action is read as an integer of shape ``[*B]`` or as a one-hot vector ``[*B, n]``; the shape decides,
    independently of the spec.

    Args:
        space: action space of one environment.
        batch_size: ``[]`` or ``[n]``.
        categorical: use the spec :class:`Categorical` for a ``Discrete`` space instead of :class:`OneHot`.

    Raises:
        UnsupportedError: the space is a ``Dict``, a ``Tuple`` or another unsupported space.
    """

    def __init__(self, space: gym.Space[Any], batch_size: Sequence[int], categorical: bool) -> None:
        self._batch = tuple(batch_size)
        self.read = self._box
        if isinstance(space, spaces.Discrete):
            self._n, self._start = int(space.n), int(space.start)
            self.spec: TensorSpec = Categorical(self._n) if categorical else OneHot(self._n)
            self.read = self._discrete
        elif isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
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
                f"The action space must be Box, Discrete, MultiDiscrete (one axis) or MultiBinary, got {space}: "
                "wrap the environment to give it one of these."
            )
        self._shape = (*self._batch, *self.spec.shape)
        self._dtype = space.dtype

    def _discrete(self, action: torch.Tensor) -> Any:
        values = _numpy(action)
        if values.shape == self._batch and values.dtype.kind in "iu":
            index = values
            listed = values.ravel().tolist()  # faster than numpy for the few rows of a batch
            valid = min(listed) >= 0 and max(listed) < self._n
        elif values.shape == (*self._batch, self._n):
            index = values.argmax(-1)
            valid = bool((values.sum(-1) == 1).all() and ((values == 0) | (values == 1)).all())
        else:
            valid, index = False, values
        if not valid:
            raise ArgumentError(
                f"A discrete action must be an integer in [0, {self._n}) of shape {list(self._batch)}, or one-hot of "
                f"shape {[*self._batch, self._n]}, got {action.dtype} of shape {list(action.shape)}: {action}."
            )
        return index.astype(np.int64) + self._start if self._batch else int(index) + self._start

    def _multi(self, action: torch.Tensor) -> Any:
        values = _numpy(action)
        fits = values.shape == self._shape and values.dtype.kind in "iub"
        if not fits or bool((values < 0).any() or (values >= self._limits).any()):
            raise ArgumentError(
                f"The action must hold integers in [0, {self._limits.tolist()}) and have shape {list(self._shape)}, "
                f"got {action.dtype} of shape {list(action.shape)}: {action}."
            )
        return (values + self._starts).astype(self._dtype)

    def _box(self, action: torch.Tensor) -> Any:
        values = _numpy(action)
        if values.shape != self._shape or (values.dtype.kind != "f" and self.spec.dtype != action.dtype):
            raise ArgumentError(
                f"The action must be {self.spec.dtype} of shape {list(self._shape)}, "
                f"got {action.dtype} of shape {list(action.shape)}."
            )
        return values.astype(self._dtype)


def _numpy(action: torch.Tensor) -> np.ndarray[Any, Any]:
    return action.numpy(force=True)


def brief(value: object) -> str:
    """Return the ``repr`` of a value, on one line and at most 80 characters long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_SHOWN = 80


def box_spec(space: spaces.Box) -> TensorSpec:
    """Return the spec of the tensors that stand for the values of a ``Box``."""
    kind = numpy_dtype(space)
    dtype = torch.from_numpy(np.empty(0, kind)).dtype
    if not np.isfinite(space.low).any() and not np.isfinite(space.high).any():
        return Unbounded(*space.shape, dtype=dtype) if space.shape else Unbounded((), dtype=dtype)
    low, high = (torch.from_numpy(_within(bound, kind)) for bound in (space.low, space.high))
    return Bounded(low, high, space.shape, dtype=dtype)


def _within(bound: np.ndarray[Any, Any], kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if kind.kind == "i" and bound.dtype == np.uint64:
        bound = np.minimum(bound, np.iinfo(kind).max)
    return np.array(bound, dtype=kind)


def numpy_dtype(space: gym.Space[Any]) -> np.dtype[Any]:
    """Return the dtype of a space's values as tensors: one that torch calculates with."""
    dtype = cast("np.dtype[Any]", space.dtype)
    if dtype.kind == "f" and dtype.itemsize > _WIDEST:
        return np.dtype(np.float32)
    return np.dtype(f"i{min(2 * dtype.itemsize, 8)}") if dtype.kind == "u" and dtype.itemsize > 1 else dtype


_WIDEST = 4  # bytes of a float
