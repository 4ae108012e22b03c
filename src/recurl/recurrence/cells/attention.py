"""Attention over a window of past inputs: what a cell passes to :meth:`Time.attend`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Attention(NamedTuple):
    """Queries, keys and values of R rows.

    Attributes:
        query: ``[R, heads, D]``, scaled.
        key: keys of the rows' own inputs, ``[R, heads, D]``.
        value: their values, ``[R, heads, D]``.
        position: scores of the distances 0 (the own input) to M, ``[R, heads, M + 1]``.
        to_key: map from inputs to their keys, ``[heads, D, E]``.
        to_value: map from inputs to their values, ``[heads, D, E]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor
    to_key: Tensor
    to_value: Tensor

    def once(self, before: Tensor) -> Tensor:
        """Return the result ``[R, heads, D]`` of one step, each row with its own window ``[R, M, E]``.

        An input x has the key ``K x``, and ``query (K x) = (query K) x``: queries are mapped instead of the windows.
        """
        before, present = present_inputs(before)
        query = wide(self.query)
        readers = torch.einsum("rhd,hde->rhe", query, wide(self.to_key))
        content = [torch.einsum("rhe,rme->rhm", readers, wide(before)), (query * wide(self.key)).sum(-1, keepdim=True)]
        scores = torch.cat(content, -1) + self.position.flip(-1)
        allowed = torch.cat([present, torch.ones_like(present[:, :1])], 1)
        weights = scores.masked_fill(~allowed.unsqueeze(1), -torch.inf).softmax(-1).to(self.value.dtype)
        sums = torch.einsum("rhm,rme->rhe", weights[..., :-1], before)
        return torch.einsum("rhe,hde->rhd", sums, self.to_value) + weights[..., -1:] * self.value


def wide(x: Tensor) -> Tensor:
    """Return a tensor in the dtype of scores: at least float32.

    Example:
        >>> wide(torch.zeros((), dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def present_inputs(window: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs ``[*, E]``, zeros where there is none, and where there is one.

    Example:
        >>> present_inputs(torch.tensor([[5.0, 0.0], [6.0, 1.0]]))
        (tensor([[0., 0.],
                [6., 1.]]), tensor([False,  True]))
    """
    present = window[..., -1] > 0
    return torch.where(present.unsqueeze(-1), window, 0), present


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
