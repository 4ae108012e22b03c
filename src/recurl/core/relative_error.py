"""Error of a tensor relative to what is expected."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["relative_error"]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return ``|found - expected| / |expected|`` in Frobenius norms, or the absolute error if ``expected`` is zero.

    It is infinite, not NaN, where the difference isn't finite: ``max`` of several errors would skip a NaN.

    Args:
        found: real or complex, of any dtype and device.
        expected: of the same shape.

    Example:
        >>> relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
        0.1
        >>> max(0.1, relative_error(torch.tensor(float("nan")), torch.tensor(1.0)))
        inf
    """
    wide = torch.complex128 if found.is_complex() or expected.is_complex() else torch.float64
    expected = expected.detach().to(wide)
    difference, size = (found.detach().to(expected.device, wide) - expected).norm().item(), expected.norm().item()
    error = difference / size if size else difference
    return error if math.isfinite(error) else math.inf
