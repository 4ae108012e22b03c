"""Segments: where a flat stream of tokens is cut, computed once per batch and shared by all that read sequences.

A batch of shape ``[*B, T]`` is a stream of N tokens in row-major order. A token starts a **segment** when it starts a
row, when its ``is_init`` is true, or when it is not the next step of the previous token's trajectory: its trajectory id
differs, or its number within the trajectory isn't the next one. Segments are independent of each other: each starts
from the state stored at its first token.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from recurl._torch import edits_of, is_functorch_active
from recurl.errors import ArgumentError, UsageError

_T = TypeVar("_T")


class _Cached(cached_property[_T]):
    """A cached property without a lock. ``torch.compile`` can trace it: while it does nothing is kept."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = self.func(instance)
        if not torch.compiler.is_compiling():
            vars(instance)[self.attrname] = value
        return value


@dataclass(frozen=True)
class HostPlan:
    """Segments sorted by length, for backends that step over time on the host.

    Tokens are *packed* as in ``torch.nn.utils.rnn.PackedSequence``: first the first tokens of all segments, longest
    segment first, then the second tokens, and so on. S segments, L tokens in the longest.

    Attributes:
        starts: int64 ``[S]``, on the device: first token of each segment, longest segment first.
        ends: int64 ``[S]``, on the device: last token of each segment, same order.
        order: int64 ``[N]``, on the device: the token at each packed position.
        batch_sizes: int64 ``[L]``, on the host: how many segments have a token at each step.
    """

    starts: Tensor
    ends: Tensor
    order: Tensor
    batch_sizes: Tensor

    @cached_property
    def steps(self) -> list[int]:
        """``batch_sizes`` as a list of ints."""
        return self.batch_sizes.tolist()


class Boundaries:
    """The segments of one batch, as N-sized tensors on the batch's device; nothing here waits for the device.

    Build it with :meth:`from_is_init`, :meth:`from_traj_ids` or :meth:`from_cu_seqlens`. The one exception to "no wait"
    is :meth:`host`, which fetches the segment lengths once and keeps them.

    Attributes:
        starts: bool ``[N]``, true at the first token of each segment.
        batch_shape: ``(*B, T)``, whose product is N.
        begin_at_states: True where the maker knows that segments begin only where the batch stores states.
        plans: what kernels have found out about the segments, by names of their own.

    Example:
        >>> is_init = torch.tensor([[True, False, True, False], [False, False, False, False]])
        >>> boundaries = Boundaries.from_is_init(is_init)
        >>> boundaries.starts.tolist()
        [True, False, True, False, True, False, False, False]
        >>> boundaries.lengths.tolist()
        [2, 2, 4]
    """

    def __init__(self, starts: Tensor, batch_shape: Sequence[int]) -> None:
        self.starts = starts
        self.batch_shape = torch.Size(batch_shape)
        self.begin_at_states = False
        self.plans: dict[Hashable, Tensor] = {}

    @classmethod
    def from_is_init(
        cls,
        is_init: Tensor,
        traj_ids: Tensor | None = None,
        batch_shape: Sequence[int] | None = None,
        traj_steps: Tensor | None = None,
    ) -> Boundaries:
        """Cut at row starts, where ``is_init`` is true, and where a token isn't its trajectory's next step.

        Args:
            is_init: bool (or uint8) ``[*B, T]`` or ``[*B, T, 1]``.
            traj_ids: integers of the batch's shape (a trailing dimension of 1 is accepted too), or None.
            batch_shape: ``(*B, T)``. Without it a trailing dimension of 1 (after at least one other) is taken for the
                feature dimension of ``is_init``.
            traj_steps: number of each step within its trajectory id, integers of the batch's shape, or None.

        Raises:
            UsageError: ``is_init`` is not boolean.
            ArgumentError: the shapes don't fit, or there is no time dimension.
        """
        if batch_shape is None:
            trailing = is_init.ndim > 1 and is_init.shape[-1] == 1
            batch_shape = is_init.shape[:-1] if trailing else is_init.shape
        shape = torch.Size(batch_shape)
        if len(shape) == 0:
            raise ArgumentError(
                "A sequence needs a time dimension, the last of the batch shape; got an empty batch shape. "
                "In recurrent mode pass a batch of shape [T] or [*B, T]."
            )
        flags = _per_token("is_init", is_init, shape)
        if flags.dtype not in (torch.bool, torch.uint8):
            raise UsageError(f"is_init must be boolean, got {flags.dtype}. Convert it: is_init != 0 or is_init.bool().")
        starts = _with_row_starts(flags.clone() if flags.dtype == torch.bool else flags.bool(), shape)
        if traj_ids is not None:
            starts = starts | _changes(_per_token("traj_ids", traj_ids, shape))
        if traj_steps is not None:
            starts = starts | _changes(_per_token("traj_steps", traj_steps, shape), 1)
        return cls(starts, shape)

    @classmethod
    def from_traj_ids(cls, traj_ids: Tensor) -> Boundaries:
        """Cut at row starts and where the trajectory id, an integer tensor ``[*B, T]``, changes."""
        if traj_ids.ndim == 0:
            raise ArgumentError("traj_ids must have a time dimension: shape [T] or [*B, T], got a scalar.")
        shape = traj_ids.shape
        return cls(_with_row_starts(_changes(traj_ids.reshape(-1)), shape), shape)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, num_tokens: int) -> Boundaries:
        """Cut a flat stream by cumulative lengths.

        Args:
            cu_seqlens: integers ``[S + 1]``, from 0 to N and not decreasing: segment s holds the tokens
                ``cu_seqlens[s]`` to ``cu_seqlens[s + 1] - 1``. Empty segments are allowed and vanish.
            num_tokens: N.
        """
        if cu_seqlens.ndim != 1 or cu_seqlens.dtype.is_floating_point or cu_seqlens.shape[0] == 0:
            raise ArgumentError(
                "cu_seqlens must be a 1-d integer tensor of S + 1 offsets, "
                f"got shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}."
            )
        starts = torch.zeros(num_tokens + 1, dtype=torch.bool, device=cu_seqlens.device)
        starts.scatter_(0, cu_seqlens.long(), True)
        starts = _with_row_starts(starts[:num_tokens].clone(), torch.Size([num_tokens]))
        return cls(starts, (num_tokens,))

    @classmethod
    def of_rows(cls, batch_shape: Sequence[int]) -> Boundaries:
        """Cut at row starts alone, on the CPU: rows ``(*B, T)`` are segments."""
        shape = torch.Size(batch_shape)
        return cls(_with_row_starts(torch.zeros(shape.numel(), dtype=torch.bool), shape), shape)

    def remember(self, is_init: Tensor, traj_ids: Tensor | None = None, traj_steps: Tensor | None = None) -> None:
        """Have :func:`boundaries_of` return this for the arguments, from which it has been computed.

        For tensors that the caller has made, such as parts of a batch whose boundaries are cut from those of the whole.
        Does nothing where that keeps nothing.
        """
        sources = (is_init, traj_ids, traj_steps)
        if _is_kept(sources):
            _cache[is_init] = (self.batch_shape, [_Source(source) for source in sources], self)

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.starts.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of all tensors here."""
        return self.starts.device

    @_Cached
    def rows(self) -> int:
        """How many rows the batch has: 1 for ``[T]``, and for a batch without rows."""
        return math.prod(self.batch_shape[:-1]) or 1

    @_Cached
    def ends(self) -> Tensor:
        """Bool ``[N]``, true at the last token of each segment."""
        return torch.cat([self.starts[1:], self.starts.new_ones(min(1, self.num_tokens))])

    @_Cached
    def segment_ids(self) -> Tensor:
        """int64 ``[N]``: which segment a token belongs to, counted from 0 in stream order."""
        return self.starts.cumsum(0) - 1

    @_Cached
    def num_segments(self) -> Tensor:
        """int64 scalar on the device: how many segments there are."""
        return self.starts.sum()

    @_Cached
    def start_index(self) -> Tensor:
        """int64 ``[N]``: the first token of the segment that each token belongs to."""
        if self.num_tokens == 0:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        token = torch.arange(self.num_tokens, device=self.device)
        return torch.where(self.starts, token, 0).cummax(0).values

    @_Cached
    def row_ids(self) -> Tensor:
        """int64 ``[N]``: which row of the batch, counted over all of ``*B``, a token belongs to."""
        length = max(self.batch_shape[-1], 1)
        return torch.arange(self.num_tokens, device=self.device).div(length, rounding_mode="floor")

    @_Cached
    def flipped(self) -> Boundaries:
        """The boundaries of the reversed stream: token n there is token N - 1 - n here."""
        return Boundaries(self.ends.flip(0), self.batch_shape)

    @property
    def lengths(self) -> Tensor:
        """int64 ``[S]``: tokens in each segment, in stream order. Waits for the device (its shape depends on data)."""
        first = self.starts.nonzero().squeeze(-1)
        return torch.diff(first, append=first.new_full((1,), self.num_tokens))

    @_Cached
    def _host(self) -> HostPlan:
        first = self.starts.nonzero().squeeze(-1)
        lengths = torch.diff(first, append=first.new_full((1,), self.num_tokens))
        by_length = lengths.argsort(descending=True, stable=True)
        rank = torch.empty_like(by_length)
        rank[by_length] = torch.arange(by_length.shape[0], device=self.device)
        time = torch.arange(self.num_tokens, device=self.device) - self.start_index
        counts = torch.bincount(time)
        offsets = counts.cumsum(0) - counts
        position = offsets[time] + rank[self.segment_ids]
        order = torch.empty_like(position)
        order[position] = torch.arange(self.num_tokens, device=self.device)
        starts = first[by_length]
        return HostPlan(starts, starts + lengths[by_length] - 1, order, counts.cpu())

    def host(self) -> HostPlan:
        """Return the segments sorted by length. The first call waits for the device; later ones are free."""
        return self._host

    def split(self, values: Tensor) -> list[Tensor]:
        """Cut ``values`` (``[N, ...]`` or ``[*B, T, ...]``) into its segments, each ``[length, ...]``, in order."""
        flat = values.reshape(self.num_tokens, *values.shape[self._lead_dims(values) :])
        return list(flat.split(self.lengths.tolist()))

    def stitch(self, segments: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`split`: put segments back together, ``[*B, T, ...]``."""
        flat = torch.cat(list(segments))
        return flat.reshape(*self.batch_shape, *flat.shape[1:])

    def _lead_dims(self, values: Tensor) -> int:
        lead = len(self.batch_shape)
        if values.shape[:lead] == self.batch_shape:
            return lead
        if values.ndim and values.shape[0] == self.num_tokens:
            return 1
        raise ArgumentError(
            f"values must start with the batch shape {tuple(self.batch_shape)} or with N={self.num_tokens}, "
            f"got shape {tuple(values.shape)}."
        )


def _per_token(name: str, values: Tensor, shape: torch.Size) -> Tensor:
    if values.shape != shape and values.shape != torch.Size([*shape, 1]):  # Dynamo can't compare by "in"
        raise ArgumentError(
            f"{name} must have the batch shape {tuple(shape)}, with or without a trailing 1; "
            f"got shape {tuple(values.shape)}."
        )
    return values.reshape(-1)


def _with_row_starts(starts: Tensor, shape: torch.Size) -> Tensor:
    """``starts`` ``[N]``, true at the first token of each row too: changed in place."""
    starts.view(shape)[..., :1].fill_(True)
    return starts


def _changes(numbers: Tensor, growth: int = 0) -> Tensor:
    """Bool ``[N]``: a number isn't the one before plus ``growth``."""
    changed = torch.zeros(numbers.shape[0], dtype=torch.bool, device=numbers.device)
    changed[1:] = numbers[1:] != (numbers[:-1] + growth if growth else numbers[:-1])
    return changed


class _Source:
    """A tensor as it was: by its contents on a CPU, elsewhere by its count of edits, which not every edit raises."""

    __slots__ = ("_contents", "_tensor", "_version")

    def __init__(self, tensor: Tensor | None) -> None:
        self._contents: Tensor | None = None
        self._tensor, self._version = tensor, 0
        if tensor is not None and tensor.device.type == "cpu":
            self._contents, self._tensor = tensor.detach().clone(), None
        elif tensor is not None:
            self._version = edits_of(tensor)

    def is_still(self, tensor: Tensor | None) -> bool:
        """Whether ``tensor`` is what it was."""
        if self._contents is None:
            return tensor is self._tensor and (tensor is None or edits_of(tensor) == self._version)
        if tensor is None:
            return False
        return (
            tensor.shape == self._contents.shape
            and tensor.dtype == self._contents.dtype
            and tensor.device.type == "cpu"
            and torch.equal(tensor, self._contents)
        )


_Entry = tuple[torch.Size, list[_Source], Boundaries]
_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def boundaries_of(
    is_init: Tensor, traj_ids: Tensor | None, batch_shape: Sequence[int], traj_steps: Tensor | None = None
) -> Boundaries:
    """Return :meth:`Boundaries.from_is_init` of the arguments, computed once per batch where that is safe.

    On a CPU the result is kept as long as ``is_init`` lives and all contents are what they were, however they might
    have been edited (through NumPy, ``.data``, shared memory). On other devices contents can't be compared without
    waiting: there only what :meth:`Boundaries.remember` was given is kept, until torch counts an edit. Tensors under
    ``torch.compile`` or ``vmap`` are never kept, nor is anything while a CUDA graph is captured: replays must compute
    it again from the tensors' new contents.
    """
    shape, sources = torch.Size(batch_shape), (is_init, traj_ids, traj_steps)
    if not _is_kept(sources):
        return Boundaries.from_is_init(is_init, traj_ids, shape, traj_steps)
    entry: _Entry | None = _cache.get(is_init)
    if entry is not None:
        kept_shape, kept, boundaries = entry
        if kept_shape == shape and all(map(_Source.is_still, kept, sources)):
            return boundaries
    boundaries = Boundaries.from_is_init(is_init, traj_ids, shape, traj_steps)
    if is_init.device.type == "cpu":
        boundaries.remember(is_init, traj_ids, traj_steps)
    return boundaries


def _is_kept(sources: Sequence[Tensor | None]) -> bool:
    """Whether edits of the sources would be noticed."""
    if _is_transformed():  # first: torch.compile can't trace the rest
        return False
    tensors = [source for source in sources if source is not None]
    plain = all(type(source) is Tensor for source in tensors)
    return plain and not any(s.device.type != "cpu" and (s.is_inference() or _is_capturing(s)) for s in tensors)


def _is_transformed() -> bool:
    return torch.compiler.is_compiling() or is_functorch_active()


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
