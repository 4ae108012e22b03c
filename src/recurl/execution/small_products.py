"""Products of thin matrices as sums, which a compiler fuses with the operations around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["small_product"]

FEW = 4
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def small_product(operation: Any, arguments: tuple[Any, ...]) -> Tensor | None:
    """Return the result of a matrix product with few rows, columns or terms, computed by multiplying and adding.

    Policies have such products at both ends: a few observed numbers, a few actions, one value. As matrix products they
    are separate kernels, which move the whole batch for little work and can't be fused with their neighbors.

    Args:
        operation: an ATen operation, such as ``torch.ops.aten.mm.default``.
        arguments: its arguments.

    Returns:
        The result, rounded like float32 sums, or None for any other operation, which the caller must run itself.

    Example:
        >>> small_product(torch.ops.aten.mm.default, (torch.ones(5, 3), torch.ones(3, 2))).shape
        torch.Size([5, 2])
        >>> small_product(torch.ops.aten.mm.default, (torch.ones(5, 8), torch.ones(8, 5))) is None
        True
    """
    if operation not in _PRODUCTS:
        return None
    a, b = arguments[-2:]
    if not a.dtype.is_floating_point or a.dtype != b.dtype or 0 in (*a.shape, *b.shape):
        return None
    (rows, terms), columns = a.shape, b.shape[1]
    if terms <= FEW:
        result = a[:, :1] * b[:1]
        for term in range(1, terms):
            result = result + a[:, term : term + 1] * b[term : term + 1]
    elif columns <= FEW:
        result = torch.stack([(a * b[:, column]).sum(1) for column in range(columns)], 1)
    elif rows <= FEW:
        result = torch.stack([(a[row, :, None] * b).sum(0) for row in range(rows)])
    else:
        return None
    return result if len(arguments) == 2 else result + arguments[0]
