"""Execution of linear-recurrence cells over segments through their ``step``."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recurl.core.torch_compat import is_compiling, is_functorch_active
from recurl.recurrence.backend import LayerCall, Support, recorded_as, without_autocast
from recurl.recurrence.cells import States
from recurl.recurrence.cells.attention import Keys, Scored, least, score, weighted
from recurl.recurrence.cells.time import Projection, present_inputs
from recurl.recurrence.linear import LINEAR, linear_recurrence
from recurl.recurrence.matrix import MATRIX, gated_matrix_recurrence
from recurl.sequences.index import Boundaries, readable


class Segments:
    """:class:`~recurl.recurrence.Time` over a flat stream, where each segment starts from its stored state.

    Args:
        boundaries: the segments.
        backend: backend of the recurrences.
        after: whether states are wanted that take more than a vector per token.
    """

    def __init__(self, boundaries: Boundaries, backend: str, after: bool = True) -> None:
        self.boundaries, self.backend, self.after = boundaries, backend, after

    def recur(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the state after ``h = a * h + b`` at every token."""
        return linear_recurrence(a, b.expand_as(h), h, self.boundaries, self.backend)

    def recur_complex(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the result of :meth:`recur` for complex numbers given as pairs."""
        result = self.recur(_complex(a), _complex(b.expand_as(h)), _complex(h))
        return torch.view_as_real(result).to(h.dtype)

    def count(self, before: Tensor, modulus: int) -> Tensor:
        """Return the number of steps modulo ``modulus`` at every token."""
        start = self.boundaries.start_index
        steps = (torch.arange(before.shape[0], device=before.device) - start + 1) % modulus
        wide = torch.promote_types(before.dtype, torch.float32)  # sums are up to twice the modulus
        counted = before[start].to(wide) + steps.view(-1, *(1,) * (before.ndim - 1))
        return (counted % modulus).to(before.dtype)

    def recur_max(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the state after ``h = max(a + h, b)`` at every token, by doubling as in ``ScanLinear``."""
        cut = self.boundaries.starts.reshape(-1, *(1,) * (h.ndim - 1))
        h = torch.maximum(torch.where(cut, a + h, b), b)
        shift, length = 1, self.boundaries.batch_shape[-1]
        while shift < length:
            reached = torch.maximum(a[shift:] + h[:-shift], h[shift:])
            h = torch.cat([h[:shift], torch.where(cut[shift:], h[shift:], reached)])
            a = torch.cat([a[:shift], a[shift:] + a[:-shift]])
            cut = torch.cat([cut[:shift], cut[shift:] | cut[:-shift]])
            shift *= 2
        return h

    def remember(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        rate: Tensor,
        before: Tensor,
        delta: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Write into matrices at every token; return what they hold, and the matrices after the ends of segments.

        Chunks take the place of ``scan``, of ``loop`` where lengths of segments can't be read, and of ``triton`` for
        dtypes that its kernels don't have. Of matrices that aren't wanted, those stored are returned.
        """
        chunked = {
            "scan": True,
            "loop": not readable(self.boundaries.starts),
            "triton": self.backend == "triton" and MATRIX.named("triton").unsupported(value.device, value.dtype),
        }
        backend = "chunked" if chunked.get(self.backend) else self.backend
        wide = torch.promote_types(value.dtype, torch.float32)
        inputs = (query, key, value, log_decay.to(wide), rate.to(wide), before.to(wide), self.boundaries, backend)
        result, after = gated_matrix_recurrence(*inputs, delta=delta, after=self.after)
        return result, before if after is None else after.to(before.dtype)

    def window(self, x: Tensor, before: Tensor) -> Tensor:
        """Return the last inputs at every token, including its own."""
        start, past = self.boundaries.start_index, before.shape[1]
        token = torch.arange(x.shape[0], device=x.device)
        inputs = [x]
        for lag in range(1, past + 1):
            age = token - start  # number of earlier tokens in the segment
            own = torch.cat([x[:lag], x[:-lag]])
            stored = before[start, (past - lag + age).clamp(max=past - 1)]
            inputs.insert(0, torch.where((age >= lag).unsqueeze(-1), own, stored))
        return torch.stack(inputs, 1)

    def attend(
        self, query: Tensor, position: Tensor, inputs: Tensor, before: Tensor, project: Projection
    ) -> tuple[Tensor, Tensor]:
        """Attend to the last inputs at every token; return the results and the inputs to keep.

        Keys lie in two places, whose scores share a softmax: in the stream, of which a block of M tokens sees itself
        and the block before, and in the stored windows, which the first M tokens of a segment see.
        """
        tokens, past = inputs.shape[0], before.shape[1]
        in_stream = self._in_stream(query, position, project(inputs[:, :-1]), past)
        totals = _unblocked(in_stream.scores.logsumexp(-1).transpose(1, 2), tokens)  # [N, heads]
        first, at, since = self._readers(before)
        windows, present = present_inputs(before[first])
        distance = since.unsqueeze(-1) + past - torch.arange(past, device=before.device)
        allowed = (distance <= past) & present.unsqueeze(1) & (at < tokens).unsqueeze(-1)
        keys = Keys(*project(windows[..., :-1]), distance, allowed)
        stored = score(_rows(query, at), _rows(position, at), keys)
        more = totals.new_full((tokens + 1, totals.shape[1]), least(totals))
        more = more.index_copy(0, at.flatten(), stored.scores.logsumexp(-1).transpose(1, 2).flatten(0, 1))
        totals = torch.stack([totals, more[:-1]]).logsumexp(0)
        result = _unblocked(weighted(in_stream, _blocks(totals, past).transpose(1, 2)), tokens)
        from_windows = weighted(stored, _rows(totals, at).transpose(1, 2)).flatten(0, 1)
        added = result.new_zeros(tokens + 1, *result.shape[1:]).index_copy(0, at.flatten(), from_windows)
        return result + added[:-1], self._kept(inputs, windows, at, since)

    def _in_stream(self, query: Tensor, position: Tensor, projected: tuple[Tensor, Tensor], past: int) -> Scored:
        """Return the scores of the keys in the stream, in blocks of ``past`` tokens, ``[N / M, heads, M, 2 M]``."""
        own = torch.arange(past, device=query.device)
        distance = own.unsqueeze(1) + past - torch.arange(2 * past, device=query.device)
        token = torch.arange(query.shape[0], device=query.device)
        since = _blocks(token - self.boundaries.start_index, past).unsqueeze(-1)  # earlier tokens in the segment
        allowed = (distance >= 0) & (distance <= past) & (distance <= since)
        keys, values = (_with_previous(_blocks(value, past)) for value in projected)
        return score(_blocks(query, past), _blocks(position, past), Keys(keys, values, distance, allowed))

    def _kept(self, inputs: Tensor, windows: Tensor, at: Tensor, since: Tensor) -> Tensor:
        """Return the last M inputs after every token, from the stream and from stored windows, ``[N, M, H + 1]``."""
        tokens, past = inputs.shape[0], windows.shape[1]
        number = torch.arange(past, device=inputs.device)
        own = torch.arange(tokens, device=inputs.device) - self.boundaries.start_index >= past - 1 - number.unsqueeze(1)
        stream = torch.cat([inputs.new_zeros(past - 1, inputs.shape[1]), inputs]).unfold(0, past, 1).transpose(1, 2)
        kept = torch.where(own.mT.unsqueeze(-1), stream, 0)
        still = (since.unsqueeze(-1) + 1 + number).clamp(max=past)  # number in the window, or past it
        later = torch.cat([windows, torch.zeros_like(windows[:, :1])], 1)
        later = later[torch.arange(windows.shape[0], device=at.device)[:, None, None], still]
        later = torch.where((at < tokens)[..., None, None], later, 0)
        return kept.index_add(0, at.clamp(max=tokens - 1).flatten(), later.flatten(0, 1))

    def _readers(self, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return which tokens see a stored window, in groups that see the same one.

        The groups are the first M tokens of each segment that is stored with inputs. Where tensors can't be read, as in
        a CUDA graph, every token is a group, as their number must not depend on the data.

        Returns:
            The first token of each group's segment ``[S]``, the tokens of each group ``[S, Q]``, N in the place of
            those that see nothing, and the number of earlier tokens in their segment.
        """
        start, past = self.boundaries.start_index, before.shape[1]
        token = torch.arange(before.shape[0], device=before.device)
        if not readable(before):
            since = token - start
            return start, torch.where(since < past, token, before.shape[0]).unsqueeze(1), since.unsqueeze(1)
        first = (self.boundaries.starts & (before[..., -1] > 0).any(1)).nonzero()
        since = torch.arange(past, device=before.device).expand(first.shape[0], past)
        at = first + since
        own = start[at.clamp(max=before.shape[0] - 1)] == first
        return first.squeeze(1), torch.where(own & (at < before.shape[0]), at, before.shape[0]), since


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


def _complex(pairs: Tensor) -> Tensor:
    wide = torch.promote_types(pairs.dtype, torch.float32)  # complex dtypes start at float32
    return torch.view_as_complex(pairs.to(wide).contiguous())


class LinearBackend:
    """Backend for cells whose step takes ``time``: the step runs once on all tokens, its recurrence as one operator.

    Args:
        name: name of the linear-recurrence kernels.
    """

    cells = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.kernels = LINEAR.named(name)

    def missing(self) -> str | None:
        """Return what must be installed, or None."""
        return self.kernels.missing()

    def unsupported(self, support: Support) -> str | None:
        """Return why the call can't be served, or None."""
        return self.missing() or self.kernels.unsupported(support.device, support.dtype)

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Run the layer."""
        time = Segments(call.boundaries, self.name, call.options.after)

        def step() -> tuple[Tensor, States]:
            with nullcontext() if is_compiling() else recorded_as(self.name):
                return call.cell.step(call.x, call.states, *call.weights, time=time)

        with without_autocast(call.x.device):
            if call.options.recompute and not is_functorch_active():  # torch.func decides itself what to save
                return checkpoint(step, use_reentrant=False)
            return step()
