"""Attention over a window of past inputs: scores by distance, and sums over keys that may lie in two places."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Keys(NamedTuple):
    """What a set of tokens may attend to.

    Attributes:
        keys: ``[G, K, heads, D]``, for G groups of tokens.
        values: ``[G, K, heads, D]``.
        distance: int64, how many steps each key lies back, broadcastable to ``[G, Q, K]``.
        allowed: bool, which keys each of the Q tokens of a group attends to, broadcastable to ``[G, Q, K]``.
    """

    keys: Tensor
    values: Tensor
    distance: Tensor
    allowed: Tensor


class Scored(NamedTuple):
    """Scores of keys, and what they weigh.

    Attributes:
        scores: ``[G, heads, Q, K]``, at least float32; hugely negative where a key isn't allowed.
        values: ``[G, K, heads, D]``, zero where they aren't finite.
        tainted: bool ``[G, Q]``: tokens whose query isn't finite, or that attend to a key or value that isn't.
    """

    scores: Tensor
    values: Tensor
    tainted: Tensor


def score(query: Tensor, position: Tensor, to: Keys) -> Scored:
    """Return the scores of keys; what isn't finite reaches only tokens that attend to it, and no gradient of others.

    Args:
        query: ``[G, Q, heads, D]``, scaled.
        position: scores of the distances, ``[G, Q, heads, M + 1]``.
        to: the keys.
    """
    # Products are taken of all pairs in a group, so what isn't finite is taken out: 0 times NaN is NaN.
    groups, tokens = query.shape[:2]
    allowed = to.allowed.expand(groups, tokens, to.keys.shape[1])
    broken = ~(to.keys.isfinite() & to.values.isfinite()).flatten(2).all(2)
    tainted = (allowed & broken.unsqueeze(1)).any(-1) | ~query.isfinite().flatten(2).all(2)
    query, position = (torch.where(tainted[..., None, None], 0, value) for value in (query, position))
    keys, values = (torch.where(broken[..., None, None], 0, value) for value in (to.keys, to.values))
    content = torch.einsum("gqhd,gkhd->ghqk", query, keys)
    distance = to.distance.clamp(0, position.shape[-1] - 1).expand(allowed.shape)
    at = distance.unsqueeze(1).expand(content.shape)
    scores = content + position.transpose(1, 2).gather(-1, at)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return Scored(scores.masked_fill(~allowed.unsqueeze(1), least(scores)), values, tainted)


def least(scores: Tensor) -> float:
    """Return the score of a key that isn't allowed; finite, so that tokens without any key have no NaN."""
    return torch.finfo(scores.dtype).min / 2


def weighted(scored: Scored, total: Tensor) -> Tensor:
    """Return the sum of values weighted by the softmax of their scores, ``[G, Q, heads, D]``.

    Args:
        scored: the keys.
        total: logarithm of the sum of all exponentials of a token's scores, ``[G, heads, Q]``.
    """
    weights = (scored.scores - total.unsqueeze(-1)).exp().to(scored.values.dtype)
    result = torch.einsum("ghqk,gkhd->gqhd", weights, scored.values)
    return result.masked_fill(scored.tainted[..., None, None], torch.nan)


def sinusoids(count: int, width: int, like: Tensor) -> Tensor:
    """Return the encodings of the distances 0 to ``count - 1``, ``[count, width]``: sines, then cosines.

    Source: Vaswani et al., "Attention is all you need" (2017), in the order of Dai et al., "Transformer-XL" (2019).

    Example:
        >>> sinusoids(2, 4, torch.zeros(()))
        tensor([[0.0000, 0.0000, 1.0000, 1.0000],
                [0.8415, 0.0100, 0.5403, 0.9999]])
    """
    half, exact = (width + 1) // 2, torch.promote_types(like.dtype, torch.float32)
    exponent = torch.arange(half, dtype=exact, device=like.device) / half
    phase = torch.arange(count, dtype=exact, device=like.device).unsqueeze(1) / 10_000**exponent
    return torch.cat([phase.sin(), phase.cos()], 1)[:, :width].to(like.dtype)
