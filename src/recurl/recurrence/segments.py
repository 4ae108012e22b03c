"""Execution of linear-recurrence cells over segments through their ``step``."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recurl.core.errors import UsageError
from recurl.core.torch_compat import is_compiling, is_functorch_active
from recurl.recurrence.attention import ATTENTION, windowed_attention
from recurl.recurrence.attention.chunked import readers_of
from recurl.recurrence.backend import LayerCall, OperatorSupport, Support, recorded_as, without_autocast
from recurl.recurrence.cells import States
from recurl.recurrence.cells.attention import Attention, present_inputs
from recurl.recurrence.linear import LINEAR, linear_recurrence
from recurl.recurrence.matrix import MATRIX, gated_matrix_recurrence
from recurl.sequences.index import Boundaries, readable
from recurl.sequences.stored import stored_at


class Segments:
    """:class:`~recurl.recurrence.Time` over a flat stream, where each segment starts from its stored state.

    Args:
        boundaries: the segments.
        backend: backend of the recurrences and of attention.
        precision: precision of products in float32.
        after: whether states are wanted that take more than a vector per token.
    """

    def __init__(self, boundaries: Boundaries, backend: str, precision: str = "ieee", after: bool = True) -> None:
        self.boundaries, self.backend, self.precision, self.after = boundaries, backend, precision, after

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
        counted = before[start].round().to(wide) + steps.view(-1, *(1,) * (before.ndim - 1))
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
        dtypes and sizes that its kernels don't have. Of matrices that aren't wanted, those stored are returned, of
        every S-th token as they may be.
        """
        support = OperatorSupport(value.device, value.dtype, keys=key.shape[-1], values=value.shape[-1])
        chunked = (
            self.backend == "scan"
            or (self.backend == "loop" and not readable(self.boundaries.starts))
            or (self.backend == "triton" and MATRIX.named("triton").unsupported(support))
        )
        backend = "chunked" if chunked else self.backend
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

    def attend(self, attention: Attention, inputs: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the last inputs at every token; return the results and the inputs to keep.

        The inputs ``before`` may be those of every S-th token. Of inputs that aren't wanted, those stored are returned.
        """
        query, key, value, position, to_key, to_value = attention
        result = windowed_attention(
            *(query, key, value, position, self.boundaries, before, to_key, to_value),
            *(self.backend, self.precision),
        )
        return result, self._kept(inputs, before) if self.after else before

    def _kept(self, inputs: Tensor, before: Tensor) -> Tensor:
        """Return the last M inputs after every token, from the stream and from stored windows, ``[N, M, E]``."""
        tokens, past = inputs.shape[0], before.shape[1]
        number = torch.arange(past, device=inputs.device)
        own = torch.arange(tokens, device=inputs.device) - self.boundaries.start_index >= past - 1 - number.unsqueeze(1)
        stream = torch.cat([inputs.new_zeros(past - 1, inputs.shape[1]), inputs]).unfold(0, past, 1).transpose(1, 2)
        kept = torch.where(own.mT.unsqueeze(-1), stream, 0)
        first, at, since = readers_of(before, self.boundaries)
        windows, _ = present_inputs(stored_at(before, first, tokens))
        still = (since.unsqueeze(-1) + 1 + number).clamp(max=past)  # number in the window, or past it
        later = torch.cat([windows, torch.zeros_like(windows[:, :1])], 1)
        later = later[torch.arange(windows.shape[0], device=at.device)[:, None, None], still]
        later = torch.where((at < tokens)[..., None, None], later, 0)
        return kept.index_add(0, at.clamp(max=tokens - 1).flatten(), later.flatten(0, 1))


@contextmanager
def _explaining_long_windows(call: LayerCall) -> Generator[None]:
    """Context manager that tells which window fits where one of attention needs more memory than there is.

    Its scores need memory as well as the inputs that are kept.
    """
    try:
        yield
    except RuntimeError as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
        if not out_of_memory or call.cell.attention(call.x.shape[-1]) is None:
            raise
        raise _too_long(call.states[0], call.x.shape[0]) from error


def _too_long(before: Tensor, tokens: int) -> UsageError:
    """Return the error for windows that don't fit into memory after so many tokens."""
    _, past, width = before.shape
    free = torch.cuda.mem_get_info(before.device)[0] if before.is_cuda else _free_on_host()
    fits = free // (3 * tokens * width * before.element_size())  # the windows, and twice their parts
    advice = f"a window of {fits} fits: shorten it, or " if 0 < fits < past else ""
    return UsageError(
        f"The windows after {tokens} tokens, of {past} inputs of {width - 1} numbers, don't fit into the memory of "
        f"{before.device}; {advice}process fewer tokens at once, in a narrower dtype or with narrower layers."
    )


def _free_on_host() -> int:
    """Return the free bytes of memory, or 0 where the system doesn't say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _complex(pairs: Tensor) -> Tensor:
    wide = torch.promote_types(pairs.dtype, torch.float32)  # complex dtypes start at float32
    return torch.view_as_complex(pairs.to(wide).contiguous())


class LinearBackend:
    """Backend for cells whose step takes ``time``: the step runs once on all tokens, its recurrence as one operator.

    Args:
        name: name of the linear-recurrence kernels.
    """

    cells = None
    reads_sparse_states = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.kernels = LINEAR.named(name)

    def missing(self) -> str | None:
        """Return what must be installed, or None."""
        return self.kernels.missing()

    def unsupported(self, support: Support) -> str | None:
        """Return why the call can't be served, or None."""
        reason = self.missing() or self.kernels.unsupported(OperatorSupport(support.device, support.dtype))
        sizes = support.cell.attention(support.hidden_size)
        if reason is not None or sizes is None:
            return reason
        call = OperatorSupport(support.device, support.dtype, support.compiling, *sizes)
        kernels = ATTENTION.named(self.name)
        return kernels.missing() or kernels.unsupported(call)

    def run(self, call: LayerCall) -> tuple[Tensor, States]:
        """Run the layer."""
        time = Segments(call.boundaries, self.name, call.options.precision, call.options.after)

        def step() -> tuple[Tensor, States]:
            with nullcontext() if is_compiling() else recorded_as(self.name):
                return call.cell.step(call.x, call.states, *call.weights, time=time)

        with without_autocast(call.x.device), nullcontext() if is_compiling() else _explaining_long_windows(call):
            if call.options.recompute and not is_functorch_active():  # torch.func decides itself what to save
                return checkpoint(step, use_reentrant=False)
            return step()
