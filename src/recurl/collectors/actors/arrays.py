"""Tensors as NumPy arrays, which Ray's object store holds without pickling or copying."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["Array", "arrays_of", "tensors_of"]

_Key = TypeVar("_Key")
_Numbers: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Array(NamedTuple):
    """A tensor as a NumPy array; dtypes that NumPy lacks, such as bfloat16, are viewed as integers of the same size."""

    values: _Numbers
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> Array:
        """Convert ``tensor``, without a copy if it is on the CPU."""
        tensor, name = tensor.detach().cpu(), str(tensor.dtype).removeprefix("torch.")
        try:
            return cls(tensor.numpy(), name)
        except TypeError:
            return cls(tensor.view(_AS_INTEGERS[tensor.dtype.itemsize]).numpy(), name)

    def tensor(self, values: _Numbers) -> Tensor:
        """Convert ``values``, which are writable and encoded like this array, to a tensor."""
        return torch.from_numpy(values).view(getattr(torch, self.dtype))


def arrays_of(tensors: Mapping[_Key, Tensor]) -> dict[_Key, Array]:
    """Convert tensors to arrays."""
    return {key: Array.of(tensor) for key, tensor in tensors.items()}


def tensors_of(arrays: Mapping[_Key, Array]) -> dict[_Key, Tensor]:
    """Copy arrays to tensors.

    Example:
        >>> tensors_of(arrays_of({"x": torch.ones(2, dtype=torch.bfloat16)}))
        {'x': tensor([1., 1.], dtype=torch.bfloat16)}
    """
    return {key: array.tensor(array.values.copy()) for key, array in arrays.items()}
