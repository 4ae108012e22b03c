"""The backend ``chunked``: matrix products over chunks of tokens, for any device and also under ``torch.compile``.

Within a chunk, with G the product of the decays since the segment's start and S the state before it, the state after
token t is ``G_t S + sum over s <= t of G_t / G_s k_s u_s^T``. What is written, u, is ``b v``, or with the delta rule
the solution of a unit triangular system (Yang et al., "Parallelizing linear transformers with the delta rule over
sequence length", 2024; with decays: Yang et al., "Gated delta networks", 2025). Tokens of other segments are masked, so
a chunk may hold any number of segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.recurrence.cells import States
from recurl.recurrence.isolation import Isolation
from recurl.recurrence.matrix.kernels import COMPUTED, MatrixInputs, MatrixKernels
from recurl.sequences.index import Boundaries, readable

_CHUNK = 32


class ChunkedMatrix(MatrixKernels):
    """Chunks of 32 tokens of all rows at once; a loop over the chunks of a row carries the state.

    If segments within rows start from stored states that aren't zero or need gradients, segments take the place of
    rows, where states can be read. Elsewhere, each token of a segment that starts in a chunk reads the stored state by
    itself.
    """

    name = "chunked"

    def forward(self, inputs: MatrixInputs, keep: bool) -> tuple[States, States]:
        """Return the results, and the states at the ends of segments."""
        groups, inside = _groups(inputs.states, inputs.boundaries)
        streams = _Streams.of(inputs, inside)
        heads, width = inputs.value.shape[1:]
        tokens = inputs.boundaries.num_tokens
        state = streams.value.new_zeros(groups[0].shape[0], heads, inputs.key.shape[-1], width)
        isolation = Isolation(inputs.boundaries, *inputs[:5])
        results: list[Tensor] = []
        finals: list[tuple[Tensor, Tensor]] = []
        for at in groups:
            chunk = _Chunk.of(streams, at, state[: at.shape[0]])
            results.append(chunk.results().transpose(1, 2).flatten(0, 1))
            if inputs.after:
                finals.append(chunk.finals(streams.ends[at]))
            state = chunk.last_state()
        numbers = torch.cat([at.flatten() for at in groups])
        order = numbers.new_zeros(tokens + 1).scatter(0, numbers, torch.arange(numbers.shape[0], device=numbers.device))
        result = isolation(torch.cat(results).index_select(0, order[:tokens]).to(inputs.value.dtype))
        if not inputs.after:
            return (result,), ()
        ends, states = (torch.cat(parts) for parts in zip(*finals, strict=True))
        states = isolation(states, ends.clamp(max=tokens - 1))
        return (result, state.new_zeros(tokens + 1, *state.shape[1:]).index_copy(0, ends, states)[:tokens]), ()


def _groups(stored: Tensor | None, boundaries: Boundaries) -> tuple[list[Tensor], bool]:
    """Return the tokens of each chunk, ``[G, C]``, and whether segments within chunks may start from stored states.

    Where rows or segments end, N takes the place of a token.
    """
    tokens = boundaries.num_tokens
    rows = torch.arange(tokens, device=boundaries.device).unflatten(0, (-1, boundaries.batch_shape[-1]))
    counts = [rows.shape[0]] * -(-rows.shape[1] // _CHUNK)
    inside = stored is not None
    if stored is not None and readable(stored):
        inside = False
        within = rows[:, 1:][boundaries.starts[rows[:, 1:]]]
        if stored.requires_grad or (stored[within] != 0).any():
            plan = boundaries.host()
            counts = plan.steps[::_CHUNK]
            rows = plan.starts.unsqueeze(1) + torch.arange(len(plan.steps), device=boundaries.device)
            rows = rows.masked_fill(rows > plan.ends.unsqueeze(1), tokens)
    rows = F.pad(rows, (0, -rows.shape[1] % _CHUNK), value=tokens)
    return [at[:count] for at, count in zip(rows.split(_CHUNK, 1), counts, strict=True)], inside


class _Streams(NamedTuple):
    """Inputs of all tokens and of one more, for padding.

    Attributes:
        query: ``[N + 1, heads, K]``, like key, value, log_decay and rate.
        stored: ``[N, heads, K, V]``, or None.
        starts: bool ``[N + 1]``.
        start_index: int64 ``[N + 1]``.
        ends: bool ``[N + 1]``.
        inside: whether segments that start inside a chunk start from ``stored``.
        delta: as in :class:`MatrixInputs`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    rate: Tensor
    stored: Tensor | None
    starts: Tensor
    start_index: Tensor
    ends: Tensor
    inside: bool
    delta: bool

    @staticmethod
    def of(inputs: MatrixInputs, inside: bool) -> _Streams:
        query, key, value, log_decay, rate, stored, boundaries, delta, _ = inputs
        wide = COMPUTED[value.dtype]

        def padded(x: Tensor) -> Tensor:
            return torch.cat([x, torch.zeros_like(x[:1])]).to(wide)

        starts, ends = F.pad(boundaries.starts, (0, 1)), F.pad(boundaries.ends, (0, 1))
        start_index = F.pad(boundaries.start_index, (0, 1), value=boundaries.num_tokens)
        return _Streams(
            *(padded(query), padded(key), padded(value), padded(log_decay), padded(rate)),
            *(stored, starts, start_index, ends, inside, delta),
        )


class _Chunk(NamedTuple):
    """What C tokens of G rows read from each other and from the states before them.

    Attributes:
        at: int64 ``[G, C]``, numbers of the tokens.
        query: ``[G, heads, C, K]``.
        key: ``[G, heads, C, K]``.
        written: u, ``[G, heads, C, V]``.
        decayed: ``[G, heads, C, C]``, what remains at the first token of what the second one has written.
        kept: ``[G, heads, C]``, what remains of the state before the segment.
        state: that state where it is from before the chunk, ``[G, heads, K, V]``.
        carried: bool ``[G, 1, C]``, where it is.
        stored: that state where it is not, ``[G, heads, C, K, V]``; None for zeros.
        tainted: bool ``[G, heads, C]``, tokens whose state isn't finite.
        lost: bool ``[G, heads, C]``, tokens whose query isn't finite.
    """

    at: Tensor
    query: Tensor
    key: Tensor
    written: Tensor
    decayed: Tensor
    kept: Tensor
    state: Tensor
    carried: Tensor
    stored: Tensor | None
    tainted: Tensor
    lost: Tensor

    @staticmethod
    def of(streams: _Streams, at: Tensor, state: Tensor) -> _Chunk:
        # Matrix products mix segments, and 0 times NaN is NaN: what isn't finite is taken out, and marked.
        start, first = streams.start_index[at], at[:, :1]
        opens = streams.starts[first].unsqueeze(-1).unsqueeze(-1)
        initial = (
            0 if streams.stored is None else streams.stored[first.clamp(max=streams.stored.shape[0] - 1)].squeeze(1)
        )
        state = torch.where(opens, initial, state)
        order = torch.arange(at.shape[1], device=at.device)
        same = (start.unsqueeze(2) == start.unsqueeze(1)) & (order.unsqueeze(1) >= order)
        same, carried = same.unsqueeze(1), (start <= first).unsqueeze(1)
        query, key, value, log_decay, rate = (
            stream[at].transpose(1, 2)
            for stream in (streams.query, streams.key, streams.value, streams.log_decay, streams.rate)
        )
        lost = ~query.isfinite().all(-1)
        broken = ~(key.isfinite().all(-1) & value.isfinite().all(-1) & rate.isfinite() & (log_decay < torch.inf))
        bad_state = ~state.isfinite().flatten(2).all(2)
        state = torch.where(bad_state[..., None, None], 0, state)
        tainted = (same & broken.unsqueeze(-2)).any(-1) | (carried & bad_state.unsqueeze(-1))
        stored = None
        if streams.stored is not None and streams.inside:
            fresh = streams.stored[start.clamp(max=streams.stored.shape[0] - 1)].transpose(1, 2)
            bad = ~(carried | fresh.isfinite().flatten(3).all(3))
            tainted, stored = tainted | bad, torch.where((carried | bad)[..., None, None], 0, fresh)
        query = torch.where(lost.unsqueeze(-1), 0, query)
        key, value = (torch.where(broken.unsqueeze(-1), 0, x) for x in (key, value))
        log_decay, rate = (torch.where(broken, 0, x) for x in (log_decay, rate))
        # Sums of the decays after each token, without differences of large sums.
        later = torch.where(same & same.mT.logical_not(), log_decay.unsqueeze(-1), 0).cumsum(-2)
        decayed = torch.where(same, later, -torch.inf).exp()
        kept = torch.where(same, log_decay.unsqueeze(-2), 0).sum(-1).exp()
        written = value
        chunk = _Chunk(at, query, key, written, decayed, kept, state, carried, stored, tainted, lost)
        if streams.delta:
            written = value - chunk._read(key)
        written = rate.unsqueeze(-1) * written
        if streams.delta:
            system = rate.unsqueeze(-1) * decayed * (key @ key.mT)
            written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
        return chunk._replace(written=written)

    def results(self) -> Tensor:
        """Return the results, ``[G, heads, C, V]``."""
        result = (self.query @ self.key.mT * self.decayed) @ self.written + self._read(self.query)
        return result.masked_fill((self.tainted | self.lost).unsqueeze(-1), torch.nan)

    def last_state(self) -> Tensor:
        """Return the states after the last token, ``[G, heads, K, V]``."""
        last = self.at.shape[1] - 1
        groups = torch.arange(self.at.shape[0], device=self.at.device)
        return self._states(groups, torch.full_like(groups, last))

    def finals(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens that end segments, ``[E]``, and the states after them, ``[E, heads, K, V]``.

        Args:
            ends: bool ``[G, C]``. Where it can't be read, all tokens are returned, with zeros for the others.
        """
        if readable(ends):
            groups, tokens = ends.nonzero(as_tuple=True)
            return self.at[groups, tokens], self._states(groups, tokens)
        groups, tokens = (
            number.flatten()
            for number in torch.meshgrid(
                torch.arange(ends.shape[0], device=ends.device),
                torch.arange(ends.shape[1], device=ends.device),
                indexing="ij",
            )
        )
        states = self._states(groups, tokens)
        return self.at.flatten(), torch.where(ends.flatten()[:, None, None, None], states, 0)

    def _states(self, groups: Tensor, tokens: Tensor) -> Tensor:
        """Return the states after some tokens, ``[E, heads, K, V]``."""
        before = torch.where(self.carried[groups, :, tokens][..., None, None], self.state[groups], 0)
        if self.stored is not None:
            before = before + self.stored[groups, :, tokens]
        weights = self.decayed[groups, :, tokens].unsqueeze(-1) * self.key[groups]
        state = self.kept[groups, :, tokens][..., None, None] * before + weights.mT @ self.written[groups]
        return state.masked_fill(self.tainted[groups, :, tokens][..., None, None], torch.nan)

    def _read(self, x: Tensor) -> Tensor:
        """Return what vectors ``[G, heads, C, K]`` read from the states before the segments, decayed."""
        read = torch.where(self.carried.unsqueeze(-1), x @ self.state, 0)
        if self.stored is not None:
            read = read + torch.einsum("ghck,ghckv->ghcv", x, self.stored)
        return self.kept.unsqueeze(-1) * read
