"""Action masks: the allowed choices of a discrete action.

A mask is bool ``[*B, n]``, True where a choice is allowed. The ``n`` choices are the concatenated choices of all
integers in the action: of a ``Categorical`` or ``OneHot``, of every integer of a ``MultiCategorical``, and of every
such part of a ``Composite``, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recurl.core.errors import ArgumentError
from recurl.core.keys import ACTION_MASK
from recurl.core.specs.base import TensorSpec
from recurl.core.specs.composite import Composite
from recurl.core.specs.leaves import Binary, Categorical, MultiCategorical, OneHot
from recurl.core.torch_compat import is_compiling

__all__ = ["choice_counts", "has_mask", "masked_rand", "rows_without_choice", "split_choices"]


def choice_counts(spec: TensorSpec) -> tuple[int, ...]:
    """Return the number of choices of each integer of an action, in mask order; empty if the action can't be masked.

    Args:
        spec: action spec of one environment.

    Example:
        >>> from recurl.data import MultiCategorical, OneHot
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
    """Return whether ``observation`` has a mask of ``action``: a bool ``Binary`` entry ``"action_mask"``.

    An entry of that name with another dtype is an ordinary observation.

    Args:
        observation: observation spec, ``[*B]``.
        action: action spec of one environment.

    Raises:
        ArgumentError: there is a mask, but it doesn't match the action.
    """
    spec = observation.get(ACTION_MASK)
    if not isinstance(spec, Binary) or spec.dtype is not torch.bool:
        return False
    wanted = (*observation.shape, sum(choice_counts(action)))
    if spec.shape != wanted or not wanted[-1]:
        raise ArgumentError(
            f"{ACTION_MASK!r} must be bool {list(wanted)}, with one value for each choice of the discrete actions in "
            f"{action}, got {list(spec.shape)}: fix the environment, or rename the observation if it isn't a mask."
        )
    return True


def split_choices(values: Tensor, counts: Sequence[int], fill: float | bool) -> Tensor:
    """Split ``values``, ``[*B, sum(counts)]``, into ``[*B, len(counts), max(counts)]``, padded with ``fill``.

    Example:
        >>> split_choices(torch.arange(3), (1, 2), -1)
        tensor([[ 0, -1],
                [ 1,  2]])
    """
    width = max(counts)
    if all(count == width for count in counts):
        return values.unflatten(-1, (len(counts), width))
    places = _padded_indices.__wrapped__ if is_compiling() else _padded_indices
    padded = F.pad(values, (0, 1), value=fill)
    return padded.index_select(-1, places(tuple(counts), values.device)).unflatten(-1, (len(counts), width))


@functools.cache
def _padded_indices(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the index of every choice of every integer; padding has the index after the last choice."""
    width, total, rows, first = max(counts), sum(counts), list[int](), 0
    for count in counts:
        rows += [first + choice if choice < count else total for choice in range(width)]
        first += count
    with torch.inference_mode(False):  # the tensor is cached
        return torch.tensor(rows, device=device)


def rows_without_choice(mask: Tensor, counts: Sequence[int]) -> Tensor:
    """Return bool ``[*B]``: True where an integer of the action has no allowed choice."""
    return ~split_choices(mask, counts, False).any(-1).all(-1)


def masked_rand(spec: TensorSpec, mask: Tensor) -> Any:
    """Return random actions, uniform over the allowed choices; parts without a mask are drawn as by ``spec.rand()``.

    Args:
        spec: action spec of one environment.
        mask: allowed choices, bool ``[*B, n]``.

    Returns:
        Actions ``[*B, ...]``; a TensorDict for a ``Composite``.

    Example:
        >>> from recurl.data import Categorical
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
