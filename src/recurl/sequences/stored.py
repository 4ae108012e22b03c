"""States that are stored for every S-th token of a stream: ``[N / S, *shape]`` for N tokens.

S, the *spacing*, follows from the shape; it is 1 where every token has a state. A segment that starts at a token
without one starts from zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.sequences.index import Boundaries

__all__ = ["is_sparse", "spacing_of", "stored_at", "stored_everywhere"]


def spacing_of(stored: Tensor, tokens: int) -> int:
    """Return S for the states of a stream of ``tokens`` tokens."""
    return tokens // stored.shape[0] if stored.shape[0] else 1


def is_sparse(stored: Tensor, boundaries: Boundaries, shape: Sequence[int]) -> bool:
    """Return whether ``stored`` is ``[N / S, *shape]``, where S divides the length of the rows of ``boundaries``."""
    if stored.shape[1:] != tuple(shape) or stored.ndim == 0:
        return False
    spacing = spacing_of(stored, boundaries.num_tokens)
    whole = stored.shape[0] * spacing == boundaries.num_tokens
    return whole and spacing > 0 and boundaries.batch_shape[-1] % spacing == 0


def stored_at(stored: Tensor, at: Tensor, tokens: int) -> Tensor:
    """Return the states at some tokens, ``[*at.shape, *shape]``, zeros where none is stored.

    Args:
        stored: ``[N / S, *shape]``.
        at: int64, numbers of tokens.
        tokens: N.

    Example:
        >>> stored_at(torch.tensor([[5.0], [6.0]]), torch.tensor([0, 1, 3]), tokens=6).flatten()
        tensor([5., 0., 6.])
    """
    spacing = spacing_of(stored, tokens)
    if spacing == 1:
        return stored[at]
    found = stored[at // spacing]
    return torch.where((at % spacing == 0).reshape(*at.shape, *(1,) * (stored.ndim - 1)), found, 0)


def stored_everywhere(stored: Tensor, tokens: int) -> Tensor:
    """Return the states of all tokens, ``[N, *shape]``, zeros where none is stored.

    Example:
        >>> stored_everywhere(torch.tensor([[5.0], [6.0]]), tokens=6).flatten()
        tensor([5., 0., 0., 6., 0., 0.])
    """
    spacing = spacing_of(stored, tokens)
    if spacing == 1:
        return stored
    return F.pad(stored.unsqueeze(1), (*(0, 0) * (stored.ndim - 1), 0, spacing - 1)).flatten(0, 1)
