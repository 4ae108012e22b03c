"""Masks of actions: which choices of a discrete action are allowed.

A mask is bool ``[*B, n]``, True where a choice is allowed. The ``n`` choices are those of all integers of the action,
one after another: of a ``Categorical`` or ``OneHot``, of every integer of a ``MultiCategorical``, of every such part of
a ``Composite`` in order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recurl.errors import ArgumentError
from recurl.keys import ACTION_MASK
from recurl.specs.base import TensorSpec
from recurl.specs.composite import Composite
from recurl.specs.leaves import Binary, Categorical, MultiCategorical, OneHot

__all__ = ["choice_counts", "has_mask", "masked_rand", "rows_without_choice", "split_choices"]


def choice_counts(spec: TensorSpec) -> tuple[int, ...]:
    """Return how many choices each integer of an action has, in the order of its mask; empty if it can't be masked.

    Args:
        spec: the action of one environment.

    Example:
        >>> choice_counts(MultiCategorical([2, 5])), choice_counts(OneHot(3))
        ((2, 5), (3,))
    """
    if isinstance(spec, Composite):
        return tuple(count for child in spec.values() for count in choice_counts(child))
    if isinstance(spec, MultiCategorical):
        return spec.sizes * (spec.shape.numel() // len(spec.sizes))
    if isinstance(spec, Categorical):
        return (spec.n,) * spec.shape.numel()
    if isinstance(spec, OneHot):
        return (spec.n,) * spec.shape[:-1].numel()
    return ()


def has_mask(observation: Composite, action: TensorSpec) -> bool:
    """Return whether ``observation`` holds a mask of ``action``: an entry ``"action_mask"``, ``Binary`` and bool.

    An entry of that name and another dtype is an observation as any other.

    Args:
        observation: observations ``[*B]``.
        action: the action of one environment.

    Raises:
        ArgumentError: there is such a mask, but not of this action.
    """
    spec = observation.get(ACTION_MASK)
    if not isinstance(spec, Binary) or spec.dtype is not torch.bool:
        return False
    wanted = (*observation.shape, sum(choice_counts(action)))
    if spec.shape != wanted or not wanted[-1]:
        raise ArgumentError(
            f"{ACTION_MASK!r} must be bool {list(wanted)}, with one value for each choice of the discrete actions in "
            f"{action}, got {list(spec.shape)}: mend the environment, or name an observation that is no mask otherwise."
        )
    return True


def split_choices(values: Tensor, counts: Sequence[int], fill: float | bool) -> Tensor:
    """Return ``values``, ``[*B, sum(counts)]``, as ``[*B, len(counts), max(counts)]``, padded with ``fill``.

    Example:
        >>> split_choices(torch.arange(3), (1, 2), -1)
        tensor([[ 0, -1],
                [ 1,  2]])
    """
    width = max(counts)
    if all(count == width for count in counts):
        return values.unflatten(-1, (len(counts), width))
    places = _places.__wrapped__ if torch.compiler.is_compiling() else _places
    padded = F.pad(values, (0, 1), value=fill)
    return padded.index_select(-1, places(tuple(counts), values.device)).unflatten(-1, (len(counts), width))


@functools.cache
def _places(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the index of every choice of every integer; that of the padding follows the last choice."""
    width, total, rows, first = max(counts), sum(counts), list[int](), 0
    for count in counts:
        rows += [first + choice if choice < count else total for choice in range(width)]
        first += count
    with torch.inference_mode(False):  # it is kept
        return torch.tensor(rows, device=device)


def rows_without_choice(mask: Tensor, counts: Sequence[int]) -> Tensor:
    """Return bool ``[*B]``: True where an integer of the action has no allowed choice."""
    return ~split_choices(mask, counts, False).any(-1).all(-1)


def masked_rand(spec: TensorSpec, mask: Tensor) -> Any:
    """Return random actions: uniform over the allowed choices, otherwise as ``spec.rand()``.

    Args:
        spec: the action of one environment.
        mask: the allowed choices, bool ``[*B, n]``.

    Returns:
        Actions ``[*B, ...]``; a TensorDict for a ``Composite``.

    Example:
        >>> masked_rand(Categorical(3), torch.tensor([[False, True, False]]))
        tensor([1])
    """
    batch = mask.shape[:-1]
    if isinstance(spec, Composite):
        out = spec.expand(batch).zero()
        first = 0
        for name, child in spec.items():
            width = sum(choice_counts(child))
            out.set(name, masked_rand(child, mask[..., first : first + width]))
            first += width
        return out
    counts = choice_counts(spec)
    if not counts:
        return spec.expand(*batch, *spec.shape).rand()
    allowed = split_choices(mask, counts, False)
    index = torch.rand(allowed.shape, device=mask.device).masked_fill(~allowed, -1.0).argmax(-1)
    if isinstance(spec, OneHot):
        return F.one_hot(index, spec.n).to(spec.dtype).reshape((*batch, *spec.shape))
    return index.to(spec.dtype).reshape((*batch, *spec.shape))
