"""Products of thin matrices as sums, which a compiler joins with what is around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["small_product"]

FEW = 4
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def small_product(operation: Any, arguments: tuple[Any, ...]) -> Tensor | None:
    """Return the result of an operation that is a product with few rows, columns or terms, by multiplying and adding.

    Policies have them at both ends: a few observed numbers, a few actions, one value. As products they are kernels of
    their own, which move the whole batch for little work, and their neighbours can't be joined with them.

    Args:
        operation: of ATen, such as ``torch.ops.aten.mm.default``.
        arguments: of it.

    Returns:
        The result, rounded as float32 sums are; None for every other operation, which is to be run itself.

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
