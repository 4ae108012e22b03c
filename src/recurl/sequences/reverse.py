"""Reverse linear recurrence for discounted sums along the last dimension, cut where a coefficient is zero."""

from __future__ import annotations

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError

__all__ = ["reverse_linear_recurrence"]


def reverse_linear_recurrence(offset: Tensor, coefficient: Tensor) -> Tensor:
    """Solve ``y[t] = offset[t] + coefficient[t] * y[t + 1]`` backwards along the last dimension, with ``y[T] = 0``.

    The solution is built by doubling (Hillis and Steele, "Data parallel algorithms", 1986): after pass k, every
    ``y[t]`` holds the sum of its first ``2 ** k`` terms. This takes ``ceil(log2 T)`` passes of elementwise operations,
    with neither a loop over time nor a device synchronization.

    A zero coefficient cuts the stream: no NaN or infinity of later positions and no gradient crosses it.

    Args:
        offset: ``[..., T]``, floating point.
        coefficient: ``[..., T]``, same dtype, finite; the last position is not used.

    Returns:
        ``[..., T]``, differentiable with respect to both arguments.

    Raises:
        ArgumentError: the two shapes differ.

    Example:
        >>> reverse_linear_recurrence(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.5, 0.5, 0.5]))
        tensor([1.7500, 1.5000, 1.0000])
        >>> reverse_linear_recurrence(torch.tensor([1.0, 1.0, torch.nan]), torch.tensor([0.5, 0.0, 0.5]))
        tensor([1.5000, 1.0000,    nan])
    """
    if offset.shape != coefficient.shape:
        raise ArgumentError(
            f"offset and coefficient must have the same shape, got {tuple(offset.shape)} and "
            f"{tuple(coefficient.shape)}."
        )
    length = offset.shape[-1]
    shift, factor = 1, coefficient[..., :-1]  # factor of y[t + shift] in y[t], for t < T - shift
    while shift < length:
        cut = factor == 0  # masked, since 0 * NaN is NaN
        earlier = torch.addcmul(offset[..., :-shift], factor, offset[..., shift:].masked_fill(cut, 0.0))
        offset = torch.cat([earlier, offset[..., -shift:]], -1)
        factor = (factor[..., :-shift] * factor[..., shift:]).masked_fill(cut[..., :-shift], 0.0)
        shift *= 2
    return offset
