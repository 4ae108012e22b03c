"""Conversion of Gymnasium spaces to specs."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch

from recurl.core.specs import Bounded, TensorSpec, Unbounded

__all__ = ["box_spec", "brief", "numpy_dtype"]

spaces = gym.spaces


def brief(value: object) -> str:
    """Return the ``repr`` of a value, on one line and at most 80 characters long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


_MAX_CHARS = 80


def box_spec(space: spaces.Box) -> TensorSpec:
    """Return the spec of the tensors of a ``Box``, unbounded if no bound is finite."""
    kind = numpy_dtype(space)
    dtype = torch.from_numpy(np.empty(0, kind)).dtype
    if not np.isfinite(space.low).any() and not np.isfinite(space.high).any():
        return Unbounded(*space.shape, dtype=dtype) if space.shape else Unbounded((), dtype=dtype)
    low, high = (torch.from_numpy(_clipped(bound, kind)) for bound in (space.low, space.high))
    return Bounded(low, high, space.shape, dtype=dtype)


def _clipped(bound: np.ndarray[Any, Any], kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if kind.kind == "i" and bound.dtype == np.uint64:
        bound = np.minimum(bound, np.iinfo(kind).max)
    return np.array(bound, dtype=kind)


def numpy_dtype(space: gym.Space[Any]) -> np.dtype[Any]:
    """Return the NumPy dtype of a space's values as tensors, one that torch supports in computations."""
    dtype = cast("np.dtype[Any]", space.dtype)
    if dtype.kind == "f" and dtype.itemsize > _MAX_FLOAT_BYTES:
        return np.dtype(np.float32)
    return np.dtype(f"i{min(2 * dtype.itemsize, 8)}") if dtype.kind == "u" and dtype.itemsize > 1 else dtype


_MAX_FLOAT_BYTES = 4
