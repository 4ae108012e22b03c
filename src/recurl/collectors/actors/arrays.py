"""Tensors as NumPy arrays, which Ray's object store holds without pickling or copying."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from recurl.core.errors import ArgumentError

__all__ = ["Array", "arrays_of", "joined", "tensors_of"]

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


def joined(parts: Sequence[Mapping[_Key, Array]], dim: int | None) -> dict[_Key, Tensor]:
    """Combine the arrays of several batches into tensors: stacked when ``dim`` is None, else concatenated along it.

    Raises:
        ArgumentError: the batches differ in their entries.

    Example:
        >>> joined([arrays_of({"x": torch.ones(2)})] * 2, 0)
        {'x': tensor([1., 1., 1., 1.])}
    """
    for index, part in enumerate(parts[1:], 1):
        _check_same_entries(parts[0], part, index)
    join: Callable[[Sequence[_Numbers]], _Numbers] = np.stack if dim is None else lambda all_: np.concatenate(all_, dim)
    return {key: first.tensor(join([part[key].values for part in parts])) for key, first in parts[0].items()}


def _check_same_entries(first: Mapping[Any, Array], other: Mapping[Any, Array], index: int) -> None:
    kinds = [{key: (part.dtype, part.values.shape) for key, part in batch.items()} for batch in (first, other)]
    for key in {**first, **other}:
        one, another = (kind.get(key) for kind in kinds)
        if one != another:
            described = [f"{kind[0]} {list(kind[1])}" if kind else "missing" for kind in (one, another)]
            raise ArgumentError(
                f"The batches of all actors must have the same entries, but {key!r} is {described[0]} for actor 0 "
                f"and {described[1]} for actor {index}: create environments with the same specs, or "
                "use sync=False."
            )
