"""Segment boundaries of a flat stream of tokens, computed once per batch and shared by all sequence readers.

A batch of shape ``[*B, T]`` is a stream of N tokens in row-major order. A token starts a **segment** if it starts a
row, if its ``is_init`` is true, or if it is not the next step of the previous token's trajectory: its trajectory id
differs, or its step number is not the previous one plus 1. Segments are independent of each other: each starts from the
state stored at its first token.
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

from recurl.core.errors import ArgumentError, UsageError
from recurl.core.torch_compat import edits_of, is_compiling, is_functorch_active

_T = TypeVar("_T")


class _Cached(cached_property[_T]):
    """Cached property without a lock that ``torch.compile`` can trace; nothing is cached while tracing."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = self.func(instance)
        if not is_compiling():
            vars(instance)[self.attrname] = value
        return value


@dataclass(frozen=True)
class HostPlan:
    """Segments sorted by length, for backends that loop over time on the host.

    Tokens are *packed* as in ``torch.nn.utils.rnn.PackedSequence``: the first tokens of all segments, longest segment
    first, then the second tokens, and so on. S is the number of segments, L the length of the longest one.

    Attributes:
        starts: int64 ``[S]``, on the device: first token of each segment, longest segment first.
        ends: int64 ``[S]``, on the device: last token of each segment, in the same order.
        order: int64 ``[N]``, on the device: the token at each packed position.
        batch_sizes: int64 ``[L]``, on the host: number of segments that have a token at each step.
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
    """Segments of one batch, as tensors of size N on the batch's device.

    Build it with :meth:`from_is_init`, :meth:`from_traj_ids` or :meth:`from_cu_seqlens`. Nothing synchronizes with the
    device except :attr:`lengths`, :meth:`split` and the first call of :meth:`host`, which caches the segment lengths.

    Attributes:
        starts: bool ``[N]``, true at the first token of each segment.
        batch_shape: ``(*B, T)``, whose product is N.
        begin_at_states: True if segments are known to begin only where the batch stores states.
        plans: segment information cached by kernels, each under its own key.

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
        """Cut at row starts, where ``is_init`` is true, and where a token isn't the next step of its trajectory.

        Args:
            is_init: bool (or uint8) ``[*B, T]`` or ``[*B, T, 1]``.
            traj_ids: integers of the batch's shape (a trailing dimension of 1 is also accepted), or None.
            batch_shape: ``(*B, T)``. If omitted, a trailing dimension of 1 (after at least one other) is treated as the
                feature dimension of ``is_init``.
            traj_steps: step number within the trajectory, integers of the batch's shape, or None.

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
            cu_seqlens: integers ``[S + 1]``, from 0 to N and non-decreasing: segment s holds the tokens
                ``cu_seqlens[s]`` to ``cu_seqlens[s + 1] - 1``. Empty segments are allowed and dropped.
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
        """Cut only at row starts, on the CPU: each row of ``(*B, T)`` is one segment."""
        shape = torch.Size(batch_shape)
        return cls(_with_row_starts(torch.zeros(shape.numel(), dtype=torch.bool), shape), shape)

    def remember(self, is_init: Tensor, traj_ids: Tensor | None = None, traj_steps: Tensor | None = None) -> None:
        """Cache these boundaries, so that :func:`boundaries_of` returns them for the given arguments.

        The arguments must describe these boundaries. Intended for tensors created by the caller, such as parts of a
        batch whose boundaries are sliced from those of the full batch. Does nothing where results can't be cached.
        """
        sources = (is_init, traj_ids, traj_steps)
        if _is_cacheable(sources):
            _cache[is_init] = (self.batch_shape, [_Snapshot(source) for source in sources], self)

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.starts.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.starts.device

    @_Cached
    def rows(self) -> int:
        """Number of rows in the batch: 1 for ``[T]`` and for a batch without rows."""
        return math.prod(self.batch_shape[:-1]) or 1

    @_Cached
    def ends(self) -> Tensor:
        """Bool ``[N]``, true at the last token of each segment."""
        return torch.cat([self.starts[1:], self.starts.new_ones(min(1, self.num_tokens))])

    @_Cached
    def segment_ids(self) -> Tensor:
        """int64 ``[N]``: index of the segment that each token belongs to, in stream order from 0."""
        return self.starts.cumsum(0) - 1

    @_Cached
    def num_segments(self) -> Tensor:
        """int64 scalar on the device: number of segments."""
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
        """int64 ``[N]``: index of the batch row, over all of ``*B``, that each token belongs to."""
        length = max(self.batch_shape[-1], 1)
        return torch.arange(self.num_tokens, device=self.device).div(length, rounding_mode="floor")

    @_Cached
    def flipped(self) -> Boundaries:
        """Boundaries of the reversed stream, where token n is token N - 1 - n of this one."""
        return Boundaries(self.ends.flip(0), self.batch_shape)

    @property
    def lengths(self) -> Tensor:
        """int64 ``[S]``: length of each segment, in stream order. Synchronizes, since its shape depends on the data."""
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
        """Return the segments sorted by length. Only the first call synchronizes with the device."""
        return self._host

    def split(self, values: Tensor) -> list[Tensor]:
        """Split ``values`` (``[N, ...]`` or ``[*B, T, ...]``) into its segments, each ``[length, ...]``, in order."""
        flat = values.reshape(self.num_tokens, *values.shape[self._lead_dims(values) :])
        return list(flat.split(self.lengths.tolist()))

    def stitch(self, segments: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`split`: join segments into ``[*B, T, ...]``."""
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
    """Set ``starts`` ``[N]`` to true at the first token of each row, in place."""
    starts.view(shape)[..., :1].fill_(True)
    return starts


def _changes(numbers: Tensor, growth: int = 0) -> Tensor:
    """Return a bool tensor ``[N]``, true where a number is not the previous one plus ``growth``."""
    changed = torch.zeros(numbers.shape[0], dtype=torch.bool, device=numbers.device)
    changed[1:] = numbers[1:] != (numbers[:-1] + growth if growth else numbers[:-1])
    return changed


class _Snapshot:
    """Snapshot of a tensor: its contents on the CPU, elsewhere its version counter, which misses some edits."""

    __slots__ = ("_contents", "_tensor", "_version")

    def __init__(self, tensor: Tensor | None) -> None:
        self._contents: Tensor | None = None
        self._tensor, self._version = tensor, 0
        if tensor is not None and tensor.device.type == "cpu":
            self._contents, self._tensor = tensor.detach().clone(), None
        elif tensor is not None:
            self._version = edits_of(tensor)

    def matches(self, tensor: Tensor | None) -> bool:
        """Return whether ``tensor`` equals the snapshot."""
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


_Entry = tuple[torch.Size, list[_Snapshot], Boundaries]
_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def boundaries_of(
    is_init: Tensor, traj_ids: Tensor | None, batch_shape: Sequence[int], traj_steps: Tensor | None = None
) -> Boundaries:
    """Return :meth:`Boundaries.from_is_init` of the arguments, computed once per batch where caching is safe.

    On the CPU, the result is cached for the lifetime of ``is_init`` and is valid while all contents are unchanged,
    whatever edits them (NumPy, ``.data``, shared memory). On other devices, comparing contents would synchronize, so
    only results passed to :meth:`Boundaries.remember` are cached, until torch's version counter changes. Nothing is
    cached under ``torch.compile`` or ``vmap``, nor during CUDA graph capture, since a replay must recompute the
    boundaries from the new contents.
    """
    shape, sources = torch.Size(batch_shape), (is_init, traj_ids, traj_steps)
    if not _is_cacheable(sources):
        return Boundaries.from_is_init(is_init, traj_ids, shape, traj_steps)
    entry: _Entry | None = _cache.get(is_init)
    if entry is not None:
        kept_shape, kept, boundaries = entry
        if kept_shape == shape and all(map(_Snapshot.matches, kept, sources)):
            return boundaries
    boundaries = Boundaries.from_is_init(is_init, traj_ids, shape, traj_steps)
    if is_init.device.type == "cpu":
        boundaries.remember(is_init, traj_ids, traj_steps)
    return boundaries


def _is_cacheable(sources: Sequence[Tensor | None]) -> bool:
    """Return whether edits of the sources can be detected."""
    if _is_transformed():  # checked first, since torch.compile can't trace the rest
        return False
    tensors = [source for source in sources if source is not None]
    plain = all(type(source) is Tensor for source in tensors)
    return plain and not any(s.device.type != "cpu" and (s.is_inference() or _is_being_captured(s)) for s in tensors)


def _is_transformed() -> bool:
    return is_compiling() or is_functorch_active()


def _is_being_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
