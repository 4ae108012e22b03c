"""The sequence index of a batch: where sequences start, derived from the entries of the batch in one place.

A batch of shape ``[*B, T]`` is a stream of N tokens in row-major order. A token starts a **segment** if it starts a
row, if its ``is_init`` is true, or if it is not the next step of the previous token's trajectory: its trajectory id
differs, or its step number is not the previous one plus 1. Segments are independent of each other: each starts from the
state stored at its first token.

These entries are the stored form of the index, which can be sliced, moved and saved like any other entry. All readers
call :meth:`SequenceIndex.of`, which derives the index from them, or finds it attached to the batch.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.core.errors import ArgumentError, MissingKeyError, UsageError
from recurl.core.keys import IS_INIT, TRAJ_IDS, TRAJ_STEPS
from recurl.core.torch_compat import are_modes_active, edits_of, is_compiling, is_functorch_active

_T = TypeVar("_T")
_ArrayT = TypeVar("_ArrayT", bound=Any)
_Entries = tuple[Tensor | None, Tensor | None, Tensor | None]
_ATTACHED = "_recurl_index"


def _has_numpy() -> bool:
    """Return whether torch finds NumPy, which it doesn't require."""
    with suppress(RuntimeError):
        torch.zeros(0).numpy()
        return True
    return False


_HAS_NUMPY = _has_numpy()


class _Cached(cached_property[_T]):
    """Cached property without a lock that ``torch.compile`` can trace; nothing is cached while tracing."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = self.func(instance)
        if not (is_compiling() or is_functorch_active()):  # whose tensors are those of a trace, or of a transform
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


class SequenceIndex:
    """Segments of one batch, as tensors of size N on the batch's device.

    Get it from a batch with :meth:`of`, or from tensors with :meth:`from_is_init`, :meth:`from_traj_ids` or
    :meth:`from_cu_seqlens`. Nothing synchronizes with the device except :attr:`lengths`, :meth:`split` and the first
    call of :meth:`host`, which caches the segment lengths.

    Attributes:
        starts: bool ``[N]``, true at the first token of each segment. Don't modify it.
        batch_shape: ``(*B, T)``, whose product is N.
        begin_at_states: True if segments are known to begin only where the batch stores states.
        plans: segment information cached by kernels, each under its own key.

    Example:
        >>> is_init = torch.tensor([[True, False, True, False], [False, False, False, False]])
        >>> index = SequenceIndex.from_is_init(is_init)
        >>> index.starts.tolist()
        [True, False, True, False, True, False, False, False]
        >>> index.lengths.tolist()
        [2, 2, 4]
    """

    def __init__(self, starts: Tensor, batch_shape: Sequence[int]) -> None:
        self.starts = starts
        self.batch_shape = torch.Size(batch_shape)
        self.begin_at_states = False
        self.plans: dict[Hashable, Tensor] = {}

    @classmethod
    def of(cls, batch: Any, *, done: Tensor | None = None, mask: Tensor | None = None) -> SequenceIndex:
        """Return the index of a batch ``[*B, T]``, as its entries are now.

        It is derived from ``"is_init"`` and, if the batch has them, trajectory ids and steps. On the CPU the index is
        attached to the batch and the same object is returned as long as the entries imply it, whatever edits them
        (NumPy, ``.data``, shared memory). On other devices, where a comparison would synchronize, an index that was
        attached by :meth:`attach` is returned while the batch has the same tensors and torch counts no edit of them.
        Nothing attached is used under ``torch.compile`` and ``torch.func``, nor during CUDA graph capture, since a
        replay must derive the index from the new contents.

        Args:
            batch: a TensorDict, or ``Entries``, with a time dimension.
            done: bool ``[*B, T]``, true at the last step of a trajectory: the next token starts a segment. A batch then
                needs no ``"is_init"``.
            mask: bool ``[*B, T]``, false at padding: a token starts a segment where it changes.

        Raises:
            MissingKeyError: the batch has no ``"is_init"``.
            UsageError: ``"is_init"`` is not boolean.
            ArgumentError: the shape of an entry doesn't fit, or there is no time dimension.
        """
        shape, entries = batch.batch_size, _entries_of(batch)
        if done is None and entries[0] is None:
            raise MissingKeyError("A batch of sequences needs the entry 'is_init', true where an episode begins.")
        keeps = done is None and mask is None and _is_cacheable(entries)
        attached = getattr(batch, _ATTACHED, None) if keeps else None
        kept = attached if isinstance(attached, _Attached) and attached.index.batch_shape == shape else None
        on_host = keeps and cast(Tensor, entries[0]).is_cpu
        if kept is not None and not on_host and kept.state == _state_of(entries):
            return kept.index
        index = cls(_derived_starts(shape, *entries, done, mask), shape)
        if on_host:
            if kept is not None and kept.index.starts.is_cpu and torch.equal(kept.index.starts, index.starts):
                return kept.index
            index._attach(batch, entries)
        return index

    def attach(self, batch: Any) -> None:
        """Attach the index to a batch that it describes, so that :meth:`of` returns it.

        The index is attached to the object ``batch``: no copy or part of it has it, nor does a saved one. On devices
        other than the CPU, the entries must be tensors that the caller has created, so that all edits are counted.
        Does nothing where an index can't be kept; see :meth:`of`.
        """
        entries = _entries_of(batch)
        if _is_cacheable(entries):
            self._attach(batch, entries)

    def _attach(self, batch: Any, entries: _Entries) -> None:
        with suppress(AttributeError):  # a tensorclass
            setattr(batch, _ATTACHED, _Attached(self, entries))

    @classmethod
    def from_is_init(
        cls,
        is_init: Tensor,
        traj_ids: Tensor | None = None,
        batch_shape: Sequence[int] | None = None,
        traj_steps: Tensor | None = None,
    ) -> SequenceIndex:
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
        return cls(_derived_starts(shape, is_init, traj_ids, traj_steps), shape)

    @classmethod
    def from_traj_ids(cls, traj_ids: Tensor) -> SequenceIndex:
        """Cut at row starts and where the trajectory id, an integer tensor ``[*B, T]``, changes."""
        if traj_ids.ndim == 0:
            raise ArgumentError("traj_ids must have a time dimension: shape [T] or [*B, T], got a scalar.")
        return cls(_derived_starts(traj_ids.shape, traj_ids=traj_ids), traj_ids.shape)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, num_tokens: int) -> SequenceIndex:
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
        starts[:1].fill_(True)
        return cls(starts[:num_tokens].clone(), (num_tokens,))

    @classmethod
    def of_rows(cls, batch_shape: Sequence[int], device: torch.device | str = "cpu") -> SequenceIndex:
        """Cut only at row starts: each row of ``(*B, T)`` is one segment."""
        starts = torch.zeros(tuple(batch_shape), dtype=torch.bool, device=device)
        starts[..., :1].fill_(True)
        return cls(starts.reshape(-1), batch_shape)

    def parts(self, sizes: Sequence[int]) -> list[SequenceIndex]:
        """Split a flat index ``[N]`` into indices of consecutive parts, each of which begins with a start."""
        return [SequenceIndex(starts, starts.shape) for starts in self.starts.split(list(sizes))]

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
    def flags(self) -> Tensor:
        """uint8 ``[N]``, contiguous: :attr:`starts` as kernels read them, in the same memory if that is contiguous."""
        return self.starts.contiguous().view(torch.uint8)

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
    def positions(self) -> Tensor:
        """int64 ``[N]``: position of each token within its segment, from 0."""
        return torch.arange(self.num_tokens, device=self.device) - self.start_index

    @_Cached
    def row_ids(self) -> Tensor:
        """int64 ``[N]``: index of the batch row, over all of ``*B``, that each token belongs to."""
        length = max(self.batch_shape[-1], 1)
        return torch.arange(self.num_tokens, device=self.device).div(length, rounding_mode="floor")

    @_Cached
    def flipped(self) -> SequenceIndex:
        """Index of the reversed stream, where token n is token N - 1 - n of this one."""
        return SequenceIndex(self.ends.flip(0), self.batch_shape)

    @property
    def lengths(self) -> Tensor:
        """int64 ``[S]``: length of each segment, in stream order. Synchronizes, since its shape depends on the data."""
        first = self.starts.nonzero().squeeze(-1)
        return torch.diff(first, append=first.new_full((1,), self.num_tokens))

    @_Cached
    def _host(self) -> HostPlan:
        if self.starts.is_meta:  # sizes are those of any segments: here rows without resets
            order, time = self.segment_ids, max(self.batch_shape[-1], 1)
            return HostPlan(order[: self.rows], order[: self.rows], order, torch.full((time,), self.rows))
        first = self.starts.nonzero().squeeze(-1)
        lengths = torch.diff(first, append=first.new_full((1,), self.num_tokens))
        by_length = lengths.argsort(descending=True, stable=True)
        rank = torch.empty_like(by_length)
        rank[by_length] = torch.arange(by_length.shape[0], device=self.device)
        counts = torch.bincount(self.positions)
        offsets = counts.cumsum(0) - counts
        position = offsets[self.positions] + rank[self.segment_ids]
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


Boundaries = SequenceIndex
"""Name of the index where only the segments matter, as in backends."""
boundaries_of = SequenceIndex.from_is_init
"""Index of flags, trajectory ids, a batch shape and trajectory steps; for a batch, see :meth:`SequenceIndex.of`."""


def begins_sequence(
    flags: Iterable[_ArrayT], equal: Iterable[tuple[_ArrayT, _ArrayT]], steps: tuple[_ArrayT, _ArrayT] | None = None
) -> _ArrayT:
    """Return where tokens don't continue the previous ones, for torch tensors or NumPy arrays; give at least one.

    Args:
        flags: bool arrays, true where a token begins a sequence, such as ``is_init``.
        equal: pairs of the previous tokens' values and the tokens' values that must be equal, such as trajectory ids.
        steps: such a pair of step numbers, which must grow by 1.

    Example:
        >>> ids, steps = torch.tensor([4, 4, 5]), torch.tensor([7, 9, 10])
        >>> begins_sequence([], [(ids[:-1], ids[1:])], (steps[:-1], steps[1:])).tolist()
        [True, True]
    """
    found: list[Any] = [*flags, *(before != now for before, now in equal)]
    if steps is not None:
        found.append(steps[0] + 1 != steps[1])
    return reduce(or_, found)


def pass_on(batch: Any, other: Any) -> None:
    """Attach the index attached to ``batch``, if any, to another batch with the same entries."""
    if not is_compiling() and (attached := getattr(batch, _ATTACHED, None)) is not None:
        setattr(other, _ATTACHED, attached)


def _entries_of(batch: Any) -> _Entries:
    """Return the entries that define the index: ``"is_init"``, trajectory ids and steps; None for missing ones."""
    return batch.get(IS_INIT, None), batch.get(TRAJ_IDS, None), batch.get(TRAJ_STEPS, None)


def _derived_starts(
    shape: torch.Size,
    is_init: Tensor | None = None,
    traj_ids: Tensor | None = None,
    traj_steps: Tensor | None = None,
    done: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the starts bool ``[N]`` of a batch ``[*B, T]`` with these entries."""
    if len(shape) == 0:
        raise ArgumentError(
            "A sequence needs a time dimension, the last of the batch shape; got an empty batch shape. "
            "In recurrent mode pass a batch of shape [T] or [*B, T]."
        )
    if is_init is not None and is_init.dtype not in (torch.bool, torch.uint8):
        raise UsageError(f"is_init must be boolean, got {is_init.dtype}. Convert it: is_init != 0 or is_init.bool().")
    given = [values for values in (is_init, traj_ids, traj_steps, done, mask) if values is not None]
    is_plain = _HAS_NUMPY and _is_eager() and all(type(values) is Tensor and values.is_cpu for values in given)

    def per_step(name: str, values: Tensor) -> Any:
        if values.shape != shape and values.shape != torch.Size([*shape, 1]):  # Dynamo can't compare by "in"
            raise ArgumentError(
                f"{name} must have the batch shape {tuple(shape)}, with or without a trailing 1; "
                f"got shape {tuple(values.shape)}."
            )
        return (values.numpy() if is_plain else values).reshape(shape)  # NumPy takes a fifth of the time, if N is small

    flags: list[Any] = []
    if is_init is not None:
        flags.append(per_step("is_init", is_init if is_init.dtype == torch.bool else is_init.bool())[..., 1:])
    if done is not None:
        flags.append(per_step("done", done)[..., :-1])
    pairs: dict[str, tuple[Any, Any]] = {}
    for name, values in (("traj_ids", traj_ids), ("mask", mask), ("traj_steps", traj_steps)):
        if values is not None:
            steps = per_step(name, values)
            pairs[name] = steps[..., :-1], steps[..., 1:]
    numbers = pairs.pop("traj_steps", None)
    inner = begins_sequence(flags, pairs.values(), numbers)
    if is_plain:
        starts = torch.ones(shape, dtype=torch.bool)
        starts.numpy()[..., 1:] = inner
    else:
        starts = F.pad(inner, (min(1, shape[-1]), 0), value=True)
    return starts.reshape(-1)


class _Attached:
    """Index attached to a batch, with the entries that it describes and the edits of them that torch has counted.

    It is not saved with the batch: pickling leaves an empty dict.
    """

    __slots__ = ("_entries", "index", "state")

    def __init__(self, index: SequenceIndex, entries: _Entries) -> None:
        self.index, self.state = index, _state_of(entries)
        self._entries = entries  # kept alive, as the state names their ids

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


def _state_of(entries: _Entries) -> list[tuple[int, int]]:
    """Return what changes if an entry is replaced, or edited in a way that torch counts; not for edits on the CPU."""
    return [(id(e), 0 if e.is_cpu else edits_of(e)) for e in entries if e is not None]


def _is_cacheable(entries: _Entries) -> bool:
    """Return whether edits of the entries can be detected."""
    given = [entry for entry in entries if entry is not None]
    return _is_eager() and all(
        type(e) is Tensor and (e.is_cpu or not (is_captured(e) or e.is_inference())) for e in given
    )


def _is_eager() -> bool:
    """Return whether operations run now on the tensors that they are given."""
    if is_compiling() or is_functorch_active():  # checked first, since torch.compile can't trace the rest
        return False
    traced = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - documented under this name
    return not traced and not are_modes_active()


def readable(value: Tensor) -> bool:
    """Return whether values may be read: not on ``meta``, under function transforms, or during CUDA graph capture."""
    return not (is_compiling() or is_functorch_active() or value.is_meta or is_captured(value))


def is_captured(value: Tensor) -> bool:
    """Return whether operations on ``value`` are captured as a CUDA graph."""
    return value.is_cuda and torch.cuda.is_current_stream_capturing()
