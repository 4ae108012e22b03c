"""Replay buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.archive import load_archive, save_archive
from recurl.continuity import check_order
from recurl.data.replay_buffers.folders import fresh_folder, readable
from recurl.data.replay_buffers.marks import (
    INDEX,
    PRIORITY_WEIGHT,
    WRITE_STEP,
    fitting,
    mark_ends,
    mark_starts,
    restore,
)
from recurl.data.replay_buffers.prefetch import Prefetcher
from recurl.data.replay_buffers.samplers.base import RandomSampler, Sampler
from recurl.data.replay_buffers.storages import ListStorage, Storage
from recurl.data.replay_buffers.trajectories import TrajectoryIndex
from recurl.errors import ArgumentError, MissingKeyError, UsageError
from recurl.keys import MASK, NestedKey, next_key

__all__ = ["ReplayBuffer"]

Transform: TypeAlias = Callable[[Any], Any]
_FORMATS = (1, 2)  # since 2 only filled positions are saved
_STATE = "buffer.pt"
_ENTRIES: dict[str, NestedKey] = {
    "index": INDEX,
    "write_step": WRITE_STEP,
    "mask": MASK,
    "priority_weight": PRIORITY_WEIGHT,
}


class _Batch(NamedTuple):
    data: Any
    info: dict[str, Tensor]
    last: bool


class ReplayBuffer:
    """Stores steps in a ring, and samples batches in which a recurrent module runs correctly.

    A sample of TensorDicts, by any sampler, has ``"is_init"`` raised wherever a step doesn't directly continue the step
    before it in the stored trajectory: a recurrent module then starts anew from the state stored there. It also has

    * ``"index"``, int64 ``[N]``: positions in the storage, for :meth:`update_priority` and ``buffer[index]``;
    * ``("collector", "write_step")``, int64 ``[N]``: which write put the step there, so that an update that comes after
      the step was overwritten can be left out;
    * ``("collector", "stored")``: the entries that were raised in the sample, as they are stored. Extending a buffer
      with a sample puts them back, so that slices make no episode starts or ends, and drops what a buffer adds;
    * what the sampler adds: ``("collector", "mask")``, ``"priority_weight"``.

    The storage is never modified by sampling, and a sample never shares its memory. All methods may be called from
    several threads.

    Args:
        storage: where steps are kept; ``ListStorage(1000)`` by default.
        sampler: which steps make a batch; :class:`RandomSampler` by default.
        batch_size: steps per batch, unless :meth:`sample` is told otherwise.
        prefetch: batches that are made ahead, in a thread. They don't know of later extensions and priorities.
        pin_memory: put samples into page-locked memory, for copying to a GPU without waiting.
        transform: called with each sample; what it returns is the sample.
        generator: CPU generator of all random choices; None takes torch's default. It is part of the saved state.

    Raises:
        ArgumentError: ``batch_size`` or ``prefetch`` out of range.
        UsageError: ``pin_memory`` without an accelerator.

    Example:
        >>> from recurl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
        >>> buffer.extend(torch.arange(3)).tolist(), buffer.extend(torch.arange(3, 6)).tolist()
        ([0, 1, 2], [3, 0, 1])
        >>> buffer[:].tolist()
        [4, 5, 2, 3]
    """

    def __init__(
        self,
        *,
        storage: Storage | None = None,
        sampler: Sampler | None = None,
        batch_size: int | None = None,
        prefetch: int = 0,
        pin_memory: bool = False,
        transform: Transform | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if (batch_size is not None and batch_size < 1) or prefetch < 0:
            raise ArgumentError(f"batch_size must be positive and prefetch not negative, got {batch_size}, {prefetch}.")
        if pin_memory and not torch.cuda.is_available():
            raise UsageError(
                "pin_memory=True needs a GPU, and there is none: use pin_memory=torch.cuda.is_available()."
            )
        self.storage = ListStorage(1000) if storage is None else storage
        self.sampler = RandomSampler() if sampler is None else sampler
        self.batch_size = batch_size
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self._transforms: list[Transform] = [] if transform is None else [transform]
        self._generator = generator
        self._index: TrajectoryIndex | None = None
        self._lock = threading.RLock()
        self._prefetcher = Prefetcher(lambda: self._make(self._size(None)), prefetch) if prefetch else None

    def __len__(self) -> int:
        """Return how many steps are stored."""
        return 0 if self._index is None else len(self._index)

    @property
    def write_count(self) -> int:
        """How many steps were ever added."""
        return 0 if self._index is None else self._index.written * self._index.lanes

    def append_transform(self, transform: Transform) -> None:
        """Call ``transform`` with each sample, after the transforms there are."""
        self._transforms.append(transform)

    def extend(self, data: Any) -> Tensor:
        """Add a batch of steps, overwriting the oldest ones if there is no room.

        Args:
            data: ``[N, ...]``, or ``[*B, N, ...]`` for a storage with ``ndim`` > 1: rows go on from call to call.

        Returns:
            Their positions, int64 ``[*B, N]``.

        Raises:
            ArgumentError: more steps than there is room for, or another structure than before.
            ArgumentTypeError: a type that the storage can't hold.
            MissingKeyError: the entry that tells trajectories apart is missing.
            UsageError: the steps don't follow each other; see :func:`~recurl.continuity.check_order`.
        """
        with self._lock:
            marks = None
            stored = data
            if isinstance(data, TensorDictBase):
                data, marks = restore(data, self.storage.keys)
                stored = fitting(data, self.storage.keys)
            self.storage.prepare(stored)
            index = self._index or TrajectoryIndex(self.storage.lanes, self.storage.capacity)
            ndim, batch = self.storage.ndim, self.storage.batch_shape(data)
            shape, items = batch[:ndim], batch[ndim:].numel()
            index.check_room(shape[-1])
            starts = self.sampler.keys.starts(data, (index.lanes, shape[-1]), items, marks)
            if isinstance(data, TensorDictBase) and items == 1:
                check_order(data, torch.from_numpy(starts).reshape(data.batch_size))
            self._index = index
            change = index.append(starts)
            positions = torch.from_numpy(change.positions).reshape(shape)
            self.storage.set(positions.reshape(-1), stored)
            self.sampler.appended(index, change)
            return positions

    def add(self, data: Any) -> Tensor:
        """Add one step, ``[...]``, or one per lane, ``[*B, ...]``; see :meth:`extend`. Returns positions ``[*B]``."""
        if isinstance(data, TensorDictBase | Tensor):
            dim = self.storage.ndim - 1
            return self.extend(data.unsqueeze(dim)).squeeze(dim)
        return self.extend([data]).squeeze(0)

    def __getitem__(self, index: int | slice | Tensor) -> Any:
        """Return what is stored, without marks: by positions ``[N]``, or the n-th steps in the order of positions."""
        with self._lock:
            if isinstance(index, Tensor):
                return self.storage.get(self._checked(index))
            positions = torch.from_numpy(self._filled().all_positions())[index]
            return self.storage.get(positions) if positions.ndim else self.storage.get(positions.unsqueeze(0))[0]

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Return a batch; see the class for what it holds.

        Args:
            batch_size: steps, instead of the buffer's own ``batch_size``.
            return_info: also return a dict of tensors ``[N]``: ``"index"``, ``"write_step"``, ``"starts"``, and where
                the sampler gives them ``"ends"``, ``"mask"``, ``"priority_weight"``. For data other than TensorDicts.

        Raises:
            UsageError: the buffer is empty, there is no batch size, or the sampler can't make such a batch.
        """
        batch = self._next(self._size(batch_size))
        return (batch.data, batch.info) if return_info else batch.data

    def __iter__(self) -> Iterator[Any]:
        """Yield batches: one epoch if the sampler draws without replacement, else forever.

        Raises:
            UsageError: the buffer has no batch size or is empty.
        """
        size = self._size(None)
        self._discard()
        with self._lock:
            self.sampler.start_epoch()
        last = False
        while not last:
            data, _, last = self._next(size)
            yield data

    def _size(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise UsageError("There is no batch size: give it to the buffer, or to sample().")
        return size

    def _next(self, size: int) -> _Batch:
        if self._prefetcher is None or size != self.batch_size:
            return self._make(size)
        return self._prefetcher.next()

    def _discard(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.discard()

    def _make(self, size: int) -> _Batch:
        with self._lock:
            index = self._filled()
            draw = self.sampler.draw(index, size, self._generator)
            data = self.storage.get(torch.from_numpy(draw.positions))
            starts = ~index.continues(draw.positions)
            write_step = torch.from_numpy(index.steps(draw.positions))
        if draw.starts is not None:
            starts |= draw.starts
        info = draw.info(torch.from_numpy(starts), write_step)
        if isinstance(data, TensorDictBase):
            self._mark(data, info)
        if self.pin_memory:
            data = data.pin_memory()
        for transform in self._transforms:
            data = transform(data)
        return _Batch(data, info, draw.last)

    def _mark(self, data: TensorDictBase, info: dict[str, Tensor]) -> None:
        mark_starts(data, info["starts"])
        if "ends" in info and self.sampler.truncated_key is not None:
            mark_ends(data, info["ends"], self.sampler.truncated_key)
        inner = (1,) * (data.batch_dims - 1)
        for name, key in _ENTRIES.items():
            if name in info:
                data.set(key, info[name].reshape(-1, *inner).expand(data.batch_size))

    def _filled(self) -> TrajectoryIndex:
        if self._index is None or len(self._index) == 0:
            raise UsageError("The buffer is empty: extend it first.")
        return self._index

    def _checked(self, index: Tensor) -> Tensor:
        """Return positions as int64 ``[N]`` on the CPU, all of them of stored steps."""
        positions, stored = index.detach().cpu(), self._filled()
        if positions.ndim != 1 or positions.dtype != torch.int64:
            raise ArgumentError(f"Positions must be int64 [N], got {positions.dtype} {tuple(positions.shape)}.")
        outside = (positions < 0) | (positions >= stored.lanes * stored.capacity)
        outside |= positions % stored.capacity >= stored.filled
        if outside.any():
            raise ArgumentError(f"Nothing is stored at {positions[outside][:5].tolist()}; len(buffer) is {len(self)}.")
        return positions

    def _current(self, index: Tensor, write_step: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return positions, and which of them still hold the write they held when they were sampled."""
        positions = self._checked(index)
        if write_step is None:
            return positions, torch.ones_like(positions, dtype=torch.bool)
        steps = torch.from_numpy(self._filled().steps(positions.numpy()))
        return positions, steps == write_step.cpu()

    def update_priority(self, index: Tensor, priority: Tensor, write_step: Tensor | None = None) -> None:
        """Set priorities, for a sampler that has them.

        Args:
            index: int64 ``[N]``, the sample's ``"index"``. Of several priorities for one step the largest counts.
            priority: ``[N]`` or ``[N, 1]``, finite and not negative.
            write_step: int64 ``[N]``, the sample's: leaves out steps that were overwritten since.

        Raises:
            ArgumentError: the shapes differ, an index is out of range, or a priority is negative or not finite.
            UsageError: the sampler has no priorities.
        """
        if priority.numel() != index.numel():
            raise ArgumentError(
                f"There must be one priority per step, got {tuple(priority.shape)} for an index {tuple(index.shape)}."
            )
        values = priority.detach().reshape(-1).double().cpu()
        with self._lock:
            positions, current = self._current(index, write_step)
            self.sampler.update_priority(self._filled(), positions[current].numpy(), values[current].numpy())

    def update_states_(self, sample: TensorDictBase, states: dict[NestedKey, Tensor]) -> None:
        """Write recurrent states back: those after each step of a sample.

        A state goes to ``("next", key)`` of its step, if that is stored, and to ``key`` of the step that follows in the
        trajectory. Padding, and steps that were overwritten since they were sampled, are left out.

        Args:
            sample: what was sampled, ``[N]``.
            states: by root key, each ``[N, L * D, H]``.

        Raises:
            MissingKeyError: the sample has no ``"index"`` any more.
            ArgumentError: a state is not stored, or with another shape or dtype.
            UnsupportedError: the storage is a list.
        """
        index, write_step, mask = (sample.get(key, None) for key in (INDEX, WRITE_STEP, MASK))
        if index is None:
            raise MissingKeyError("The sample must have its 'index', to know where states go: keep it when selecting.")
        with self._lock:
            positions, current = self._current(index, write_step)
            if mask is not None:
                current &= mask.cpu()
            fresh = {key: state.detach()[current.to(state.device)] for key, state in states.items()}
            positions = positions[current]
            following, exists = map(torch.from_numpy, self._filled().successors(positions.numpy()))
            after: dict[NestedKey, Tensor] = {next_key(key): state for key, state in fresh.items()}
            after = {key: state for key, state in after.items() if key in self.storage.keys}
            self.storage.write(positions, after)
            before = {key: state[exists.to(state.device)] for key, state in fresh.items()}
            self.storage.write(following[exists], before)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to go on exactly, as tensors and plain Python values.

        Batches made ahead are not in it; nor is the state of torch's default generator.
        """
        with self._lock:
            filled = 0 if self._index is None else self._index.filled
            return self._small_state() | {"storage": self.storage.state_dict(filled) if filled else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`.

        Raises:
            ArgumentError: it is of a buffer of another size or format, or can't be read.
        """
        self._discard()
        with self._lock, readable("The saved buffer"):
            index = self._read_index(state)
            if state["storage"] is not None:
                self.storage.load_state_dict(state["storage"])
            self._take_small_state(state, index)

    def dumps(self, path: str | Path) -> None:
        """Save everything into the folder ``path``, replacing an earlier save there; :meth:`loads` reads it.

        The tensors are in ``path/storage`` as a memory-mapped TensorDict.

        Raises:
            UsageError: the folder has something else in it, or the buffer is empty.
        """
        path = Path(path)
        if path.exists() and any(path.iterdir()) and not (path / _STATE).exists():
            raise UsageError(f"The folder {path} has something else in it than a saved buffer: choose another.")
        with self._lock, fresh_folder(path) as fresh:
            self.storage.dumps(fresh / "storage", self._filled().filled)
            save_archive(self._small_state(), fresh / _STATE)

    def loads(self, path: str | Path) -> None:
        """Go on from what :meth:`dumps` saved. Checksums are verified, and no code is run from the files.

        Raises:
            ArgumentError: it is of a buffer of another size or format, is missing or damaged, or can't be read.
        """
        self._discard()
        state = load_archive(Path(path) / _STATE)
        with self._lock, readable(f"The saved buffer {path}"):
            index = self._read_index(state)
            self.storage.loads(Path(path) / "storage")
            self._take_small_state(state, index)

    def _small_state(self) -> dict[str, Any]:
        return {
            "format": _FORMATS[-1],
            "max_size": self.storage.max_size,
            "ndim": self.storage.ndim,
            "index": None if self._index is None else self._index.state_dict(),
            "keys": self.sampler.keys.state_dict(),
            "sampler": self.sampler.state_dict(),
            "generator": None if self._generator is None else self._generator.get_state(),
        }

    def _read_index(self, state: dict[str, Any]) -> TrajectoryIndex | None:
        """Return the index in ``state``, which must be of a buffer like this."""
        expected = {"max_size": self.storage.max_size, "ndim": self.storage.ndim}
        got = {name: state[name] for name in expected}
        if got != expected:
            raise ArgumentError(f"The saved buffer must have {expected}, it has {got}.")
        if state["format"] not in _FORMATS:
            raise ArgumentError(f"The saved buffer must be of format {_FORMATS}, it is of {state['format']!r}.")
        return None if state["index"] is None else TrajectoryIndex.from_state_dict(state["index"])

    def _take_small_state(self, state: dict[str, Any], index: TrajectoryIndex | None) -> None:
        if index is not None and (index.lanes, index.capacity) != (self.storage.lanes, self.storage.capacity):
            raise ArgumentError("The saved buffer's index and its steps have another number of rows.")
        self._index = index
        self.sampler.keys.load_state_dict(state["keys"])
        self.sampler.load_state_dict(state["sampler"])
        if self._generator is not None and state["generator"] is not None:
            self._generator.set_state(state["generator"])
