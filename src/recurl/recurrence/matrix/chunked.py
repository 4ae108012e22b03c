"""The backend ``chunked``: matrix products over chunks of tokens, for any device and also under ``torch.compile``.

Within a chunk, with G the product of the decays since the segment's start and S the state before it, the state after
token t is ``G_t S + sum over s <= t of G_t / G_s k_s u_s^T``. What is written, u, is ``b v``, or with the delta rule
the solution of a unit triangular system (Yang et al., "Parallelizing linear transformers with the delta rule over
sequence length", 2024; with decays: Yang et al., "Gated delta networks", 2025). Tokens of other segments are masked, so
a chunk may hold any number of segments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.core.autograd import have_tangents
from recurl.recurrence.cells import States
from recurl.recurrence.isolation import Isolation
from recurl.recurrence.matrix.kernels import COMPUTED, MatrixInputs, MatrixKernels
from recurl.sequences.index import Boundaries, readable
from recurl.sequences.stored import spacing_of, stored_at, stored_everywhere

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
        boundaries, tokens = inputs.boundaries, inputs.boundaries.num_tokens
        chunks, inside = _chunks(inputs.states, boundaries)
        isolation = Isolation(boundaries, *inputs[:5], *_sums_at_starts(inputs.states, boundaries))
        wide = COMPUTED[inputs.value.dtype]
        pieces = zip(*(chunks.cut(stream.to(wide)) for stream in inputs[:5]), strict=True)
        starts, ends = chunks.cut(boundaries.start_index), chunks.cut(boundaries.ends)
        before = chunks.firsts(inputs.states)
        stored = inputs.states if inside else None
        heads, width = inputs.value.shape[1:]
        state = inputs.value.new_zeros(chunks.tokens[0].shape[0], heads, inputs.key.shape[-1], width, dtype=wide)
        results: list[Tensor] = []
        finals: list[Tensor] = []
        for at, start, end, initial, piece in zip(chunks.tokens, starts, ends, before, pieces, strict=True):
            first = at[:, :1]
            opens = (start[:, :1] == first)[..., None, None]
            state = torch.where(opens, 0 if initial is None else initial, state[: at.shape[0]])
            fresh = None if stored is None else stored_at(stored, start, tokens).transpose(1, 2)
            parts = (part.transpose(1, 2) for part in piece)
            chunk = _Chunk.of(start, start <= first, state, fresh, inputs.delta, *parts)
            results.append(chunk.results().transpose(1, 2))
            if inputs.after:
                finals.append(chunk.finals(end))
            state = chunk.last_state()
        result = isolation(chunks.joined(results).to(inputs.value.dtype))
        if not inputs.after:
            return (result,), ()
        if not readable(boundaries.ends):
            return (result, isolation(chunks.joined(finals))), ()
        places = torch.cat([at[end] for at, end in zip(chunks.tokens, ends, strict=True)])
        states = isolation(torch.cat(finals), places)
        return (result, state.new_zeros(tokens, *state.shape[1:]).index_copy(0, places, states)), ()


def _chunks(stored: Tensor | None, boundaries: Boundaries) -> tuple[_Chunks, bool]:
    """Return the chunks, and whether segments within chunks may start from stored states."""
    tokens, length = boundaries.num_tokens, boundaries.batch_shape[-1]
    rows = torch.arange(tokens, device=boundaries.device).unflatten(0, (-1, length))
    inside = stored is not None
    if stored is not None and not readable(stored):
        inside = spacing_of(stored, tokens) % _CHUNK != 0  # else states are stored only where chunks begin
    elif stored is not None:
        inside = False
        within = rows[:, 1:][boundaries.starts[rows[:, 1:]]]
        if stored.requires_grad or have_tangents([stored]) or (stored_at(stored, within, tokens) != 0).any():
            plan = boundaries.host()
            rows = plan.starts.unsqueeze(1) + torch.arange(len(plan.steps), device=boundaries.device)
            pieces = _numbers(rows.masked_fill(rows > plan.ends.unsqueeze(1), tokens), tokens)
            counts = plan.steps[::_CHUNK]
            return _Chunks([at[:count] for at, count in zip(pieces, counts, strict=True)], tokens, None), inside
    return _Chunks([*_numbers(rows, tokens)], tokens, length), inside


def _sums_at_starts(stored: Tensor | None, boundaries: Boundaries) -> tuple[Tensor, ...]:
    """Return ``[N, heads]``, whose gradients become those of all numbers of stored states that are read."""
    if stored is None or not stored.requires_grad:
        return ()
    tokens = boundaries.num_tokens
    read = boundaries.starts[:: spacing_of(stored, tokens)].unsqueeze(1)
    return (stored_everywhere(torch.where(read, stored.sum((-2, -1)), 0), tokens),)


def _numbers(rows: Tensor, total: int) -> tuple[Tensor, ...]:
    """Return the numbers of tokens in chunks, padded by their total, which may be dynamic: no value for ``F.pad``."""
    return (_padded(rows - total) + total).split(_CHUNK, 1)


def _padded(x: Tensor) -> Tensor:
    """Return rows ``[R, L, ...]``, padded by zeros to whole chunks."""
    return F.pad(x, (*(0, 0) * (x.ndim - 2), 0, -x.shape[1] % _CHUNK))


class _Chunks(NamedTuple):
    """Chunks of the N tokens, in their order within rows or segments.

    Attributes:
        tokens: numbers of the tokens of each chunk, ``[G, C]``; N where a row or segment has ended.
        total: N.
        length: length of the rows if these are cut; None if segments are. Slices of rows have slices for gradients,
            where gathered tokens would be added up.
    """

    tokens: list[Tensor]
    total: int
    length: int | None

    def cut(self, stream: Tensor) -> list[Tensor]:
        """Return a tensor ``[N, ...]`` in chunks, each ``[G, C, ...]``, zero where there is no token."""
        if self.length is not None:
            return [*_padded(stream.unflatten(0, (-1, self.length))).split(_CHUNK, 1)]
        stream = torch.cat([stream, torch.zeros_like(stream[:1])])
        return [stream[at] for at in self.tokens]

    def firsts(self, stored: Tensor | None) -> list[Tensor | None]:
        """Return states ``[N / S, ...]`` at the first token of each chunk, ``[G, ...]``; None where none is stored."""
        if stored is None:
            return [None] * len(self.tokens)
        if self.length is None:
            return [stored_at(stored, at[:, 0], self.total) for at in self.tokens]
        spacing = spacing_of(stored, self.total)
        rows = stored.unflatten(0, (-1, self.length // spacing))
        firsts = range(0, self.length, _CHUNK)
        return [None if first % spacing else rows[:, first // spacing] for first in firsts]

    def joined(self, chunks: list[Tensor]) -> Tensor:
        """Return chunks as one tensor ``[N, ...]``; the inverse of :meth:`cut`."""
        if self.length is not None:
            # Inductor leaves out a copy of one tensor, but takes its strides for those of the copy.
            rows = chunks[0] if len(chunks) == 1 else torch.cat(chunks, 1)
            return rows[:, : self.length].flatten(0, 1)
        numbers = torch.cat([at.flatten() for at in self.tokens])
        places = torch.arange(numbers.shape[0], device=numbers.device)
        order = numbers.new_zeros(self.total + 1).scatter(0, numbers, places)
        return torch.cat([chunk.flatten(0, 1) for chunk in chunks]).index_select(0, order[: self.total])


class _Chunk(NamedTuple):
    """What C tokens of G rows read from each other and from the states before them.

    Attributes:
        query: ``[G, heads, C, K]``.
        key: ``[G, heads, C, K]``.
        written: u, ``[G, heads, C, V]``.
        same: bool ``[G, 1, C, C]``, whether the second token is the first one or before it in its segment.
        decayed: ``[G, heads, C, C]``, what remains at the first token of what the second one has written.
        kept: ``[G, heads, C]``, what remains of the state before the segment.
        state: that state where it is from before the chunk, ``[G, heads, K, V]``.
        carried: bool ``[G, 1, C]``, where it is.
        stored: that state where it is not, ``[G, heads, C, K, V]``; None for zeros.
        tainted: bool ``[G, heads, C]``, tokens whose state isn't finite.
        lost: bool ``[G, heads, C]``, tokens whose query isn't finite.
    """

    query: Tensor
    key: Tensor
    written: Tensor
    same: Tensor
    decayed: Tensor
    kept: Tensor
    state: Tensor
    carried: Tensor
    stored: Tensor | None
    tainted: Tensor
    lost: Tensor

    @staticmethod
    def of(
        start: Tensor,
        carried: Tensor,
        state: Tensor,
        fresh: Tensor | None,
        delta: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        rate: Tensor,
    ) -> _Chunk:
        """Return the chunk of tokens whose segments start at the tokens ``start``, ``[G, C]``.

        Those that are ``carried``, bool ``[G, C]``, have started from ``state`` before the chunk or at its first token;
        the others start from ``fresh``, ``[G, heads, C, K, V]``, or from zeros if that is None.
        """
        # Matrix products mix segments, and 0 times NaN is NaN: what isn't finite is taken out, and marked.
        order = torch.arange(start.shape[1], device=start.device)
        same = (start.unsqueeze(2) == start.unsqueeze(1)) & (order.unsqueeze(1) >= order)
        same, carried = same.unsqueeze(1), carried.unsqueeze(1)
        lost = ~query.isfinite().all(-1)
        broken = ~(key.isfinite().all(-1) & value.isfinite().all(-1) & rate.isfinite() & log_decay.exp().isfinite())
        bad_state = ~state.isfinite().flatten(2).all(2)
        state = torch.where(bad_state[..., None, None], 0, state)
        tainted = (same & broken.unsqueeze(-2)).any(-1) | (carried & bad_state.unsqueeze(-1))
        stored = None
        if fresh is not None:
            bad = ~(carried | fresh.isfinite().flatten(3).all(3))
            tainted, stored = tainted | bad, torch.where((carried | bad)[..., None, None], 0, fresh)
        query = torch.where(lost.unsqueeze(-1), 0, query)
        key, value = (torch.where(broken.unsqueeze(-1), 0, x) for x in (key, value))
        log_decay, rate = (torch.where(broken, 0, x) for x in (log_decay, rate))
        # Sums of the decays after each token, without differences of large sums.
        later = torch.where(same & same.mT.logical_not(), log_decay.unsqueeze(-1), 0).cumsum(-2)
        decayed = torch.where(same, later, -torch.inf).exp()
        kept = torch.where(same, log_decay.unsqueeze(-2), 0).sum(-1).exp()
        chunk = _Chunk(query, key, value, same, decayed, kept, state, carried, stored, tainted, lost)
        # So is what overflows: values to be written, or with the delta rule a row of the system that they solve.
        written = rate.unsqueeze(-1) * (value - chunk._read(key) if delta else value)
        system = rate.unsqueeze(-1) * chunk._products(key) if delta else written
        overflown = ~(written.isfinite().all(-1) & system.isfinite().all(-1))
        tainted = tainted | (same & overflown.unsqueeze(-2)).any(-1)
        written, system = (torch.where(overflown.unsqueeze(-1), 0, x) for x in (written, system))
        if delta:
            written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
        return chunk._replace(written=written, tainted=tainted)

    def results(self) -> Tensor:
        """Return the results, ``[G, heads, C, V]``."""
        result = self._products(self.query) @ self.written + self._read(self.query)
        return result.masked_fill((self.tainted | self.lost).unsqueeze(-1), torch.nan)

    def last_state(self) -> Tensor:
        """Return the states after the last token, ``[G, heads, K, V]``."""
        return self._states(lambda part: part[:, :, -1], lambda part: part)

    def finals(self, ends: Tensor) -> Tensor:
        """Return the states after the tokens that end segments, ``[E, heads, K, V]``.

        Args:
            ends: bool ``[G, C]``. Where it can't be read, all tokens are returned, with zeros for the others,
                ``[G, C, heads, K, V]``.
        """
        if readable(ends):
            groups, tokens = ends.nonzero(as_tuple=True)
            return self._states(lambda part: part[groups, :, tokens], lambda part: part[groups])
        states = self._states(lambda part: part.transpose(1, 2), lambda part: part.unsqueeze(1))
        return torch.where(ends[..., None, None, None], states, 0)

    def _states(self, at: Callable[[Tensor], Tensor], of_group: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the states after some tokens, ``[..., heads, K, V]``.

        Args:
            at: returns what tensors ``[G, heads, C, ...]`` have for these tokens.
            of_group: returns what tensors ``[G, heads, ...]`` have for their groups.
        """
        before = torch.where(at(self.carried)[..., None, None], of_group(self.state), 0)
        if self.stored is not None:
            before = before + at(self.stored)
        weights = at(self.decayed).unsqueeze(-1) * of_group(self.key)
        state = at(self.kept)[..., None, None] * before + weights.mT @ of_group(self.written)
        return state.masked_fill(at(self.tainted)[..., None, None], torch.nan)

    def _products(self, x: Tensor) -> Tensor:
        """Return the products of vectors ``[G, heads, C, K]`` with the keys of their segments, decayed."""
        return torch.where(self.same, x @ self.key.mT, 0) * self.decayed

    def _read(self, x: Tensor) -> Tensor:
        """Return what vectors ``[G, heads, C, K]`` read from the states before the segments, decayed."""
        read = torch.where(self.carried.unsqueeze(-1), x @ self.state, 0)
        if self.stored is not None:
            read = read + torch.einsum("ghck,ghckv->ghcv", x, self.stored)
        return self.kept.unsqueeze(-1) * read
