"""Gradients that aren't finite, kept to the tokens that they belong to where matrix products mix tokens.

In such products 0 times NaN is NaN, so that one gradient would spoil all. A token's gradient of an output depends on
inputs of its segment up to that token only: :class:`Isolation` passes on zeros in its place, and has NaN added to the
gradients of these inputs.

Attention doesn't use it. There the backward pass is a kernel, so :mod:`recurl.recurrence.attention.chunked` takes such
gradients out and marks what they reach by itself: a query's own, and keys at most M tokens back. Here they reach all
earlier tokens, and torch differentiates, also under ``torch.compile`` and ``torch.func``: isolation is in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from recurl.core.torch_compat import is_compiling
from recurl.sequences.index import Boundaries


class _TracedSources(Function):
    """(last, *inputs ``[N, heads, ...]``) -> zeros ``[N, heads]``, of which a gradient of NaN becomes theirs.

    ``last`` is the last token of each token's segment. Can be traced by ``torch.compile``, but not transformed.
    """

    @staticmethod
    def forward(ctx: Any, last: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(last)
        ctx.shapes = [(one.shape, one.dtype) for one in inputs]
        return inputs[0].new_zeros(inputs[0].shape[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (last,) = ctx.saved_tensors
        spoiled = grads[0].isnan().long()
        count = spoiled.cumsum(0)
        nan = torch.where(count[last] - count + spoiled > 0, torch.nan, 0.0)
        each = [(nan.reshape(*nan.shape, *(1,) * (len(shape) - 2)), shape, dtype) for shape, dtype in ctx.shapes]
        return None, *(one.expand(shape).to(dtype) for one, shape, dtype in each)


class _Sources(_TracedSources):
    """The same with forward mode and function transforms."""

    generate_vmap_rule = True

    @staticmethod
    def forward(last: Tensor, *inputs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return inputs[0].new_zeros(inputs[0].shape[:2])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        last, *given = inputs
        ctx.save_for_backward(last)
        ctx.shapes = [(one.shape, one.dtype) for one in given]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        given = next(tangent for tangent in tangents if tangent is not None)
        return given.new_zeros(given.shape[:2])


class _TracedCheck(Function):
    """(output ``[E, heads, ...]``, zeros ``[E, heads]``) -> output, whose gradients that aren't finite go to the zeros.

    Can be traced by ``torch.compile``, but not transformed.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, zeros: Tensor) -> Tensor:
        ctx.dtype = zeros.dtype
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        grad = grads[0]
        spoiled = ~grad.isfinite().flatten(2).all(2)
        cleaned = torch.where(spoiled.reshape(*spoiled.shape, *(1,) * (grad.ndim - 2)), 0.0, grad)
        return cleaned, torch.where(spoiled, torch.nan, 0.0).to(ctx.dtype)


class _Check(_TracedCheck):
    """The same with forward mode and function transforms."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, zeros: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return output.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        return None if tangents[0] is None else tangents[0].clone()


class Isolation:
    """Isolation of gradients between inputs and outputs of one operator.

    Args:
        boundaries: the segments of the N tokens.
        *inputs: its inputs, ``[N, heads, ...]``.
    """

    def __init__(self, boundaries: Boundaries, *inputs: Tensor) -> None:
        self._zeros: Tensor | None = None
        if torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
            last = boundaries.num_tokens - 1 - boundaries.flipped.start_index.flip(0)
            self._zeros = (_TracedSources if is_compiling() else _Sources).apply(last, *inputs)

    def __call__(self, output: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return an output of all tokens, or of ``tokens`` ``[E]``, ``[E, heads, ...]``, with isolated gradients."""
        if self._zeros is None:
            return output
        zeros = self._zeros if tokens is None else self._zeros[tokens]
        return (_TracedCheck if is_compiling() else _Check).apply(output, zeros)
