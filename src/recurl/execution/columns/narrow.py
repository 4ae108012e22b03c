"""Splitting narrow tensors into column vectors, and joining them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ColumnLayout", "join_columns", "split_columns"]


class ColumnLayout(NamedTuple):
    """Layout of a narrow tensor as column vectors, in the order of its indices with the last one first.

    Attributes:
        shape: shape of the tensor, with 1 for the dimension of the rows.
        axis: dimension of the rows.

    Example:
        >>> narrow = ColumnLayout(torch.Size([1, 2]), 0)
        >>> narrow.vectors(torch.tensor([[1, 2], [3, 4], [5, 6]]))
        [tensor([1, 3, 5]), tensor([2, 4, 6])]
        >>> narrow.joined(torch.tensor([[1, 3, 5], [2, 4, 6]]))
        tensor([[1, 2],
                [3, 4],
                [5, 6]])
    """

    shape: torch.Size
    axis: int

    @property
    def width(self) -> int:
        """Number of vectors."""
        return self.shape.numel()

    def vectors(self, tensor: Tensor) -> list[Tensor]:
        """Return the columns of a tensor, each contiguous; without a copy where they already are."""
        return [*tensor.movedim(self.axis, -1).reshape(self.width, -1).contiguous().unbind()]

    def joined(self, vectors: Tensor) -> Tensor:
        """Return vectors ``[..., W, rows]`` joined to tensors ``[..., *shape]``, as views of the vectors' memory."""
        *lead, _, rows = vectors.shape
        others = [size for at, size in enumerate(self.shape) if at != self.axis]
        return vectors.reshape(*lead, *others, rows).movedim(-1, len(lead) + self.axis)


def split_columns(forms: Sequence[ColumnLayout | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, each that has a layout replaced by its vectors.

    Args:
        forms: layout of each tensor, None for one that stays whole.
        tensors: the tensors, one for each layout.
    """
    found: list[Tensor] = []
    for form, tensor in zip(forms, tensors, strict=True):
        found += [tensor] if form is None else form.vectors(tensor)
    return found


def join_columns(forms: Sequence[ColumnLayout | None], steps: Sequence[Sequence[Tensor]], dim: int) -> list[Tensor]:
    """Return the tensors of several steps, each stacked along a new dimension.

    Args:
        forms: layout of each tensor, None for one that is whole.
        steps: for each step, the tensors returned by :func:`split_columns`; further ones after them are ignored.
        dim: the new dimension.

    Example:
        >>> from recurl.execution.columns.narrow import ColumnLayout, split_columns
        >>> forms = [ColumnLayout(torch.Size([1, 2]), 0), None]
        >>> steps = [split_columns(forms, [torch.tensor([[i, 2], [3, 4]]), torch.tensor(i)]) for i in range(3)]
        >>> pairs, numbers = join_columns(forms, steps, 0)
        >>> pairs[2].tolist(), numbers.tolist()
        ([[2, 2], [3, 4]], [0, 1, 2])
    """
    found, at = list[Tensor](), 0
    for form in forms:
        if form is None:
            found.append(torch.stack([step[at] for step in steps], dim))
            at += 1
            continue
        vectors = torch.stack([vector for step in steps for vector in step[at : at + form.width]])
        found.append(form.joined(vectors.unflatten(0, (len(steps), form.width))).movedim(0, dim))
        at += form.width
    return found
