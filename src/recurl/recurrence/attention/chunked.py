"""Windowed attention in operations of torch: blocks of M tokens, which see themselves and the block before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recurl.core.autograd import pull_back
from recurl.recurrence.attention.kernels import AttentionInputs, AttentionKernels, Gradients, Needs
from recurl.recurrence.cells import States
from recurl.recurrence.cells.attention import present_inputs, wide
from recurl.sequences.index import Boundaries, readable
from recurl.sequences.stored import spacing_of, stored_at


class ChunkedAttention(AttentionKernels):
    """Attention as batched matrix products over blocks of M tokens, whose gradients are those of torch."""

    def forward(self, inputs: AttentionInputs, keep: bool) -> tuple[States, States]:
        """Return the result."""
        return (attend(inputs),), ()

    def backward(self, inputs: AttentionInputs, after: States, saved: States, grads: States, needs: Needs) -> Gradients:
        """Return the gradients."""
        grad = grads[0]
        # Products are taken of all pairs in a block, so gradients that aren't finite are taken out, and marked after;
        # see recurl.recurrence.isolation.
        sick = ~(grad.isfinite() & after[0].isfinite()).all(-1)  # [N, heads]
        chosen = [tensor for tensor, need in zip(inputs.tensors, needs, strict=True) if need and tensor is not None]
        readers = _readers(inputs)

        def run(*chosen: Tensor) -> Tensor:
            left = iter(chosen)
            tensors = [next(left) if need else tensor for tensor, need in zip(inputs.tensors, needs, strict=True)]
            return attend(inputs.with_tensors(tensors), readers)

        found = iter(pull_back(run, chosen, torch.where(sick.unsqueeze(-1), 0, grad)))
        return _marked([next(found) if need else None for need in needs], inputs, sick)


def _marked(gradients: Sequence[Tensor | None], inputs: AttentionInputs, sick: Tensor) -> Gradients:
    """Return gradients with NaN where they depend on ``sick`` tokens: there, and at all that these attend to."""
    start, tokens, past = inputs.boundaries.start_index, sick.shape[0], inputs.past
    token = torch.arange(tokens, device=sick.device).unsqueeze(1)
    following = torch.where(sick, token, tokens).flip(0).cummin(0).values.flip(0)  # next sick token, N if there is none
    linked = (following < tokens) & (start[following.clamp(max=tokens - 1)] == start.unsqueeze(1))
    touched = linked & (following - token <= past)  # [N, heads]
    spacing = spacing_of(inputs.windows, tokens)
    reads = (inputs.boundaries.starts.unsqueeze(1) & touched)[::spacing]
    seen = (following - token)[::spacing].unsqueeze(-1) <= torch.arange(past, device=sick.device)  # places of windows
    present = inputs.windows[..., -1] > 0 if inputs.windows.shape[-1] else reads.new_zeros(reads.shape[0], past)
    places = (reads.unsqueeze(-1) & seen & present.unsqueeze(1)).any(1)  # [N / S, M]
    heads = (reads.unsqueeze(-1) & seen & present.unsqueeze(1)).any(-1).any(0)
    at = (sick, touched, touched, sick, places, heads.unsqueeze(-1), heads.unsqueeze(-1))
    return tuple(
        None if gradient is None else gradient.masked_fill(mask.unsqueeze(-1), torch.nan)
        for gradient, mask in zip(gradients, at, strict=True)
    )


class _Scored(NamedTuple):
    """Scores of keys.

    Attributes:
        scores: ``[G, heads, Q, K]``, at least float32; -inf where a key isn't allowed.
        forbidden: bool ``[G, 1, Q, K]``, where it isn't.
        tainted: bool ``[G, Q]``: tokens that aren't finite, or attend to a key or value that isn't.
    """

    scores: Tensor
    forbidden: Tensor
    tainted: Tensor

    def weights(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the softmax; ``total`` is the logarithm of the sum of a token's exponentials, ``[G, heads, Q]``.

        Gradients of weights are products of all pairs, which may overflow: those of keys that aren't allowed are zero.
        """
        return (self.scores - total.unsqueeze(-1)).exp().masked_fill(self.forbidden, 0).to(dtype)

    @property
    def total(self) -> Tensor:
        """Logarithm of the sum of the exponentials, ``[G, Q, heads]``; -inf without an allowed key."""
        without = self.forbidden.all(-1)  # the gradient of their logarithm would be NaN
        total = self.scores.masked_fill(without.unsqueeze(-1), 0).logsumexp(-1)
        return total.masked_fill(without, -torch.inf).transpose(1, 2)


class Readers(NamedTuple):
    """Tokens that see a stored window, in groups that see the same one.

    Attributes:
        first: the first token of each group's segment, ``[S]``.
        at: the tokens of each group, ``[S, Q]``; N in the place of those that see nothing.
        since: the number of earlier tokens in their segment, ``[S, Q]``.
    """

    first: Tensor
    at: Tensor
    since: Tensor


def _readers(inputs: AttentionInputs) -> Readers | None:
    return readers_of(inputs.windows, inputs.boundaries) if inputs.windows.shape[-1] else None


def attend(inputs: AttentionInputs, readers: Readers | None = None) -> Tensor:
    """Return the result of windowed attention, by operations that torch differentiates to any order.

    Keys lie in two places, whose scores share a softmax: in the stream, of which a block of M tokens sees itself and
    the block before, and in stored windows, which the first M tokens of a segment see. A stored input x has the key
    ``K x``, so that ``query (K x) = (query K) x``: queries are mapped instead of windows, and so are sums of values.
    Where rows are shorter than M, so are blocks.

    Args:
        inputs: the inputs.
        readers: which tokens see a stored window; None to find them.
    """
    readers = readers or _readers(inputs)
    tokens = inputs.query.shape[0]
    size = min(inputs.past, inputs.boundaries.batch_shape[-1])
    query, position, values = (_blocks(one, size) for one in (inputs.query, inputs.position, inputs.value))
    keys, values = (_with_previous(one) for one in (_blocks(inputs.key, size), values))
    broken = ~(keys.isfinite() & values.isfinite()).flatten(2).all(2)
    keys, values = (torch.where(broken[..., None, None], 0, one) for one in (keys, values))
    distance, allowed = _in_stream(inputs.boundaries, size)
    query, position, tainted = _sound(query, position, broken, allowed)
    stream = _scored(torch.einsum("gqhd,gkhd->ghqk", query, wide(keys)), position, distance, allowed, tainted)
    total = _unblocked(stream.total, tokens)
    seen = None if readers is None else _Stored(inputs, readers, total)
    total = total if seen is None else seen.total
    weights = stream.weights(_blocks(total, size).transpose(1, 2), values.dtype)
    result = torch.einsum("ghqk,gkhd->gqhd", weights, values).masked_fill(stream.tainted[..., None, None], torch.nan)
    return _unblocked(result, tokens) if seen is None else _unblocked(result, tokens) + seen.result()


class _Stored:
    """The part of attention to stored windows.

    Attributes:
        total: logarithm of the sum of all exponentials, ``[N, heads]``.
    """

    def __init__(self, inputs: AttentionInputs, readers: Readers, total: Tensor) -> None:
        assert inputs.to_key is not None
        self.inputs, tokens, past = inputs, total.shape[0], inputs.past
        first, self.at, since = readers.first, readers.at, readers.since
        windows, present = present_inputs(stored_at(inputs.windows, first, tokens))
        broken = ~windows.isfinite().all(-1)
        self.windows = torch.where(broken.unsqueeze(-1), 0, windows)
        distance = since.unsqueeze(-1) + past - torch.arange(past, device=since.device)
        allowed = (distance <= past) & present.unsqueeze(1) & (self.at < tokens).unsqueeze(-1)
        query, position, tainted = _sound(
            _rows(inputs.query, self.at), _rows(inputs.position, self.at), broken, allowed
        )
        mapped = torch.einsum("gqhd,hde->gqhe", query, wide(inputs.to_key))
        content = torch.einsum("gqhe,gke->ghqk", mapped, wide(self.windows))
        self.scored = _scored(content, position, distance, allowed, tainted)
        more = total.new_full((tokens + 1, total.shape[1]), -torch.inf)
        more = more.index_copy(0, self.at.flatten(), self.scored.total.flatten(0, 1))
        self.total = torch.stack([total, more[:-1]]).logsumexp(0)

    def result(self) -> Tensor:
        """Return the weighted sums of values, ``[N, heads, D]``."""
        assert self.inputs.to_value is not None
        weights = self.scored.weights(_rows(self.total, self.at).transpose(1, 2), self.windows.dtype)
        sums = torch.einsum("ghqk,gke->gqhe", weights, self.windows)
        found = torch.einsum("gqhe,hde->gqhd", sums, self.inputs.to_value)
        found = found.masked_fill(self.scored.tainted[..., None, None], torch.nan)
        query = self.inputs.query
        added = query.new_zeros(query.shape[0] + 1, *query.shape[1:])
        return added.index_copy(0, self.at.flatten(), found.flatten(0, 1))[:-1]


def _in_stream(boundaries: Boundaries, size: int) -> tuple[Tensor, Tensor]:
    """Return the distances of the keys in two blocks, ``[size, 2 size]``, and which are allowed, ``[G, size, 2 size]``.

    The size is M, or the length of rows, which no distance reaches.
    """
    own = torch.arange(size, device=boundaries.device)
    distance = own.unsqueeze(1) + size - torch.arange(2 * size, device=boundaries.device)
    token = torch.arange(boundaries.num_tokens, device=boundaries.device)
    since = _blocks(token - boundaries.start_index, size).unsqueeze(-1)  # earlier tokens in the segment
    return distance, (distance >= 0) & (distance <= size) & (distance <= since)


def readers_of(windows: Tensor, boundaries: Boundaries) -> Readers:
    """Return which tokens see a stored window.

    The groups are the first M tokens of each segment that is stored with inputs. Where tensors can't be read, as in a
    CUDA graph or on ``meta``, every token is a group, as their number must not depend on the data.
    """
    start, tokens, past = boundaries.start_index, boundaries.num_tokens, windows.shape[1]
    token = torch.arange(tokens, device=windows.device)
    if not readable(windows):
        since = token - start
        return Readers(start, torch.where(since < past, token, tokens).unsqueeze(1), since.unsqueeze(1))
    spacing = spacing_of(windows, tokens)
    first = spacing * (boundaries.starts[::spacing] & (windows[..., -1] > 0).any(1)).nonzero()
    since = torch.arange(min(past, boundaries.batch_shape[-1]), device=windows.device).expand(first.shape[0], -1)
    at = first + since
    own = (at < tokens) & (start[at.clamp(max=tokens - 1)] == first)
    return Readers(first.squeeze(1), torch.where(own, at, tokens), since)


def _sound(query: Tensor, position: Tensor, broken: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and positions, at least float32, zeros for tokens whose result isn't finite, and which these are.

    Products are taken of all pairs in a group, so what isn't finite is taken out: 0 times NaN is NaN.

    Args:
        query: ``[G, Q, heads, D]``.
        position: ``[G, Q, heads, M + 1]``.
        broken: which keys aren't finite, ``[G, K]``.
        allowed: ``[G, Q, K]``.
    """
    tainted = (allowed & broken.unsqueeze(1)).any(-1)
    tainted = tainted | ~query.isfinite().flatten(2).all(2) | ~position.isfinite().flatten(2).all(2)
    query, position = (torch.where(tainted[..., None, None], 0, wide(one)) for one in (query, position))
    return query, position, tainted


def _scored(content: Tensor, position: Tensor, distance: Tensor, allowed: Tensor, tainted: Tensor) -> _Scored:
    """Return scores from the products of queries and keys, ``[G, heads, Q, K]``."""
    distance = distance.clamp(0, position.shape[-1] - 1).expand(allowed.shape)
    scores = content + position.transpose(1, 2).gather(-1, distance.unsqueeze(1).expand(content.shape))
    forbidden = ~allowed.unsqueeze(1)
    return _Scored(scores.masked_fill(forbidden, -torch.inf), forbidden, tainted)


def _blocks(x: Tensor, size: int) -> Tensor:
    """Return consecutive rows in blocks, ``[ceil(N / size), size, ...]``, the last one padded with zeros."""
    missing = -x.shape[0] % size
    padded = torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
    return padded.unflatten(0, (-1, size))


def _unblocked(x: Tensor, count: int) -> Tensor:
    return x.flatten(0, 1)[:count]


def _with_previous(blocks: Tensor) -> Tensor:
    """Return each block after the one before it, ``[G, 2 size, ...]``."""
    return torch.cat([torch.cat([torch.zeros_like(blocks[:1]), blocks[:-1]]), blocks], 1)


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """Return rows by number, zeros for the number N."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[at]
