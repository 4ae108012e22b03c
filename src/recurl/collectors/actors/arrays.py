"""Tensors as NumPy arrays, which Ray's object store holds without pickling or copying."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["arrays_of", "tensors_of"]

_Key = TypeVar("_Key")


def arrays_of(tensors: Mapping[_Key, Tensor]) -> dict[_Key, Any]:
    """Convert tensors to arrays and names of dtypes, without a copy if they are on the CPU.

    Dtypes that NumPy lacks, such as bfloat16, are viewed as bytes.
    """
    arrays: dict[_Key, Any] = {}
    for key, tensor in tensors.items():
        values, name = tensor.detach().cpu(), str(tensor.dtype).removeprefix("torch.")
        try:
            arrays[key] = values.numpy(), name
        except TypeError:
            arrays[key] = values.unsqueeze(-1).view(torch.uint8).numpy(), name
    return arrays


def tensors_of(arrays: Mapping[_Key, Any]) -> dict[_Key, Tensor]:
    """Copy arrays to tensors.

    Example:
        >>> tensors_of(arrays_of({"x": torch.ones(2, dtype=torch.bfloat16)}))
        {'x': tensor([1., 1.], dtype=torch.bfloat16)}
    """
    tensors: dict[_Key, Tensor] = {}
    for key, (values, name) in arrays.items():
        tensor, dtype = torch.from_numpy(values.copy()), getattr(torch, name)
        tensors[key] = tensor if tensor.dtype == dtype else tensor.view(dtype).squeeze(-1)
    return tensors
