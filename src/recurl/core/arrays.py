"""Arrays of other libraries as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from recurl.core.errors import ArgumentTypeError

__all__ = ["as_tensor"]


def as_tensor(value: Any, what: str) -> Tensor:
    """Return an array of any library as a tensor on its device, sharing its memory where possible.

    Tensors are returned as they are. NumPy arrays that are read-only are copied, as torch can't represent them.

    Args:
        value: a tensor or NumPy array, or an object with ``__dlpack__`` (JAX, CuPy, Warp), ``__cuda_array_interface__``
            or ``__array_interface__``.
        what: description of the value, for the error message.

    Raises:
        ArgumentTypeError: ``value`` is nothing of this, or torch doesn't support its dtype or its memory.

    Example:
        >>> array = np.zeros(2)
        >>> tensor = as_tensor(array, "the observation")
        >>> array[0] = 1
        >>> tensor
        tensor([1., 0.], dtype=torch.float64)
    """
    if isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
            if hasattr(value, "__cuda_array_interface__"):
                return torch.as_tensor(value)
            if hasattr(value, "__array_interface__"):
                array = np.asarray(value)
                return torch.from_numpy(array if array.flags.writeable else array.copy())
        else:
            return torch.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{what} can't become a tensor: {type(error).__name__}: {error}") from error
    raise ArgumentTypeError(
        f"{what} must be a tensor, or an array of NumPy, CuPy, JAX, or another library with __dlpack__ or "
        f"__array_interface__; got {type(value).__name__}"
    )
