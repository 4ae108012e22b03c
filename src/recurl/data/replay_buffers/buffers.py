"""Replay buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.archive import load_archive, save_archive
from recurl.core.errors import ArgumentError, MissingKeyError, UsageError
from recurl.core.keys import MASK, NestedKey, next_key
from recurl.data.replay_buffers.folders import fresh_folder, readable
from recurl.data.replay_buffers.prefetch import Prefetcher
from recurl.data.replay_buffers.samplers.base import RandomSampler, Sampler
from recurl.data.replay_buffers.samplers.slices import SliceSampler
from recurl.data.replay_buffers.saved import FORMAT, converted, loaded_index
from recurl.data.replay_buffers.storages import ListStorage, Storage
from recurl.data.replay_buffers.trajectories import TrajectoryIndex
from recurl.sequences.continuity import check_order
from recurl.sequences.entries import Step
from recurl.sequences.sample_marks import (
    ENTRIES,
    INDEX,
    WRITE_STEP,
    mark_ends,
    mark_starts,
    restore,
    without_unstored_steps,
)
from recurl.sequences.start_states import refuse

__all__ = ["ReplayBuffer", "mark", "write_states"]

Transform: TypeAlias = Callable[[Any], Any]
_STATE = "buffer.pt"


class _Batch(NamedTuple):
    data: Any
    info: dict[str, Tensor]
    last: bool


class ReplayBuffer:
    """Ring buffer of steps whose samples can be replayed correctly by recurrent modules.

    In a sample of TensorDicts, drawn by any sampler, ``"is_init"`` is set wherever a step doesn't directly continue the
    previous one in the stored trajectory: there, a recurrent module restarts from the stored state. A sample also has

    * ``"index"``, int64 ``[N]``: positions in the storage, for :meth:`update_priority` and ``buffer[index]``;
    * ``("collector", "write_step")``, int64 ``[N]``: number of the write that stored the step, so that updates of
      overwritten steps can be skipped;
    * ``("collector", "stored")``: the stored values of the entries that differ in the sample. If a sample is added to a
      buffer, they are restored, so that slices add no episode starts or ends, and the entries listed here are dropped;
    * entries of the sampler: ``("collector", "mask")``, ``"priority_weight"``.

    Sampling never modifies the storage, and samples never share its memory. All methods are thread-safe.

    Args:
        storage: storage of the steps; ``ListStorage(1000)`` when None.
        sampler: strategy that chooses the steps of a batch; :class:`RandomSampler` when None.
        batch_size: number of steps per batch; may be overridden in :meth:`sample`.
        prefetch: number of batches sampled in advance, in a thread; they don't reflect later data and priorities.
        pin_memory: copy samples to page-locked memory, for asynchronous copies to a GPU.
        transform: function applied to each sample.
        generator: CPU generator for sampling, part of the saved state; torch's default generator when None.

    Raises:
        ArgumentError: ``batch_size`` or ``prefetch`` is out of range.
        UsageError: ``pin_memory`` is set, but there is no GPU.

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
        """Return the number of stored steps."""
        return 0 if self._index is None else len(self._index)

    @property
    def write_count(self) -> int:
        """Total number of steps ever added."""
        return 0 if self._index is None else int(self._index.written) * self._index.lanes

    def append_transform(self, transform: Transform) -> None:
        """Append a function that is applied to each sample after the existing ones."""
        self._transforms.append(transform)

    def extend(self, data: Any) -> Tensor:
        """Add a batch of steps, overwriting the oldest ones if the storage is full.

        Args:
            data: ``[N, ...]``, or ``[*B, N, ...]`` for a storage with ``ndim`` > 1; each row continues across calls.

        Returns:
            Positions of the steps, int64 ``[*B, N]``.

        Raises:
            ArgumentError: there are more steps than the storage can hold, or their entries differ from the stored ones.
            ArgumentTypeError: the storage can't hold data of this type.
            MissingKeyError: the entry that identifies trajectories is missing.
            UsageError: the steps are not consecutive; see :func:`~recurl.sequences.continuity.check_order`. Or
                recurrent states are stored only at some steps; see ``sequence_length`` of ``Collector``.
        """
        if isinstance(data, TensorDictBase):
            refuse(data, "A replay buffer")
        with self._lock:
            marks = None
            stored = data
            if isinstance(data, TensorDictBase):
                data, marks = restore(data, self.storage.keys)
                stored = without_unstored_steps(data, self.storage.keys)
            self.storage.prepare(stored)
            index = self._index
            if index is None:
                index = TrajectoryIndex(self.storage.lanes, self.storage.capacity)
            ndim, batch = self.storage.ndim, self.storage.batch_shape(data)
            shape, items = batch[:ndim], batch[ndim:].numel()
            index.check_room(shape[-1])
            starts = self.sampler.keys.starts(data, (index.lanes, shape[-1]), items, marks)
            if isinstance(data, TensorDictBase) and items == 1:
                check_order(data, starts.reshape(data.batch_size))
            self._index = index
            positions = index.append(starts)
            self.storage.set(positions.reshape(-1), stored)
            self.sampler.appended(index, positions)
            return positions.reshape(shape)

    def add(self, data: Any) -> Tensor:
        """Add one step ``[...]``, or one per lane ``[*B, ...]``, and return positions ``[*B]``; see :meth:`extend`."""
        if isinstance(data, TensorDictBase | Tensor):
            dim = self.storage.ndim - 1
            return self.extend(data.unsqueeze(dim)).squeeze(dim)
        return self.extend([data]).squeeze(0)

    def __getitem__(self, index: int | slice | Tensor) -> Any:
        """Return stored steps, without marks: at positions ``[N]``, or by int or slice over the filled positions."""
        with self._lock:
            if isinstance(index, Tensor):
                return self.storage.get(self._checked(index))
            positions = self._filled().all_positions()[index]
            return self.storage.get(positions) if positions.ndim else self.storage.get(positions.unsqueeze(0))[0]

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Sample a batch; see the class for its entries.

        Args:
            batch_size: number of steps; the buffer's ``batch_size`` when None.
            return_info: also return a dict of tensors ``[N]``: ``"index"``, ``"write_step"``, ``"starts"``, and
                depending on the sampler, ``"ends"``, ``"mask"``, ``"priority_weight"``. Useful for data without keys.

        Raises:
            UsageError: the buffer is empty, no batch size is given, or the sampler can't draw such a batch.
        """
        batch = self._next(self._size(batch_size))
        return (batch.data, batch.info) if return_info else batch.data

    def __iter__(self) -> Iterator[Any]:
        """Yield batches: one epoch if the sampler draws without replacement, else indefinitely.

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
            raise UsageError("A batch size is needed: pass batch_size to the buffer or to sample().")
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
            data = self.storage.get(draw.positions)
            starts = ~index.continues(draw.positions) if draw.starts is None else draw.starts
            write_step = index.steps(draw.positions)
        info = draw.info(starts, write_step)
        if isinstance(data, TensorDictBase):
            mark(data, info, self.sampler.truncated_key)
        if self.pin_memory:
            data = data.pin_memory()
        for transform in self._transforms:
            data = transform(data)
        return _Batch(data, info, draw.last)

    def _filled(self) -> TrajectoryIndex:
        if self._index is None or len(self._index) == 0:
            raise UsageError("The buffer is empty: extend it first.")
        return self._index

    def _checked(self, index: Tensor) -> Tensor:
        """Return positions as int64 ``[N]`` on the CPU, after checking that each holds a step."""
        positions, stored = index.detach().cpu(), self._filled()
        if positions.ndim != 1 or positions.dtype != torch.int64:
            raise ArgumentError(f"Positions must be int64 [N], got {positions.dtype} {tuple(positions.shape)}.")
        outside = (positions < 0) | (positions >= stored.lanes * stored.capacity)
        outside |= positions % stored.capacity >= stored.filled
        if outside.any():
            empty = positions[outside][:5].tolist()
            raise ArgumentError(
                f"Positions must hold steps, but nothing is stored at {empty}: the buffer has {len(self)} steps."
            )
        return positions

    def _current(self, index: Tensor, write_step: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return positions, and a bool mask of those not overwritten since they were sampled with ``write_step``."""
        positions = self._checked(index)
        if write_step is None:
            return positions, torch.ones_like(positions, dtype=torch.bool)
        return positions, self._filled().steps(positions) == write_step.cpu()

    def update_priority(self, index: Tensor, priority: Tensor, write_step: Tensor | None = None) -> None:
        """Set the priorities of steps.

        Args:
            index: int64 ``[N]``, the sample's ``"index"``. If a step occurs repeatedly, its largest priority is used.
            priority: ``[N]`` or ``[N, 1]``, finite and not negative.
            write_step: int64 ``[N]``, the sample's ``("collector", "write_step")``, to skip steps overwritten since.

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
            self.sampler.update_priority(self._filled(), positions[current], values[current])

    def update_states_(self, sample: TensorDictBase, states: dict[NestedKey, Tensor]) -> None:
        """Write the recurrent states after each step of a sample back to the storage.

        A state is written to ``("next", key)`` of its step, if stored, and to ``key`` of the next step of the
        trajectory. Padding and steps overwritten since they were sampled are skipped.

        Args:
            sample: the sample, ``[N]``, with its ``"index"``.
            states: states after each step by root key, ``[N, L * D, H]`` each.

        Raises:
            MissingKeyError: the sample has no ``"index"``.
            ArgumentError: a state is not stored, or has another shape or dtype there.
            UnsupportedError: the storage is a list.
        """
        index, write_step, mask = (sample.get(key, None) for key in (INDEX, WRITE_STEP, MASK))
        if index is None:
            raise MissingKeyError(
                "The sample must have its 'index', the positions to write the states to: keep that entry."
            )
        with self._lock:
            positions, current = self._current(index, write_step)
            if mask is not None:
                current &= mask.cpu()
            fresh = {key: state.detach()[current.to(state.device)] for key, state in states.items()}
            positions = positions[current]
            write_states(self.storage, self._filled(), positions, fresh)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, as tensors and plain Python values.

        Prefetched batches and the state of torch's default generator are not included.
        """
        with self._lock:
            filled = 0 if self._index is None else int(self._index.filled)
            return self._metadata() | {"storage": self.storage.state_dict(filled) if filled else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`.

        Raises:
            ArgumentError: ``state`` is from a buffer of another size or format, or can't be read.
        """
        self._discard()
        with self._lock, readable("The saved buffer"):
            state, index = self._converted(state)
            if state["storage"] is not None:
                self.storage.load_state_dict(state["storage"])
            self._restore_metadata(state, index)

    def dumps(self, path: str | Path) -> None:
        """Save the complete state to the folder ``path``, replacing an earlier save; :meth:`loads` restores it.

        The tensors are in ``path/storage`` as a memory-mapped TensorDict.

        Raises:
            UsageError: the folder contains other files, or the buffer is empty.
        """
        path = Path(path)
        if path.exists() and any(path.iterdir()) and not (path / _STATE).exists():
            raise UsageError(f"The folder {path} must be empty or hold a saved buffer, but contains other files.")
        with self._lock, fresh_folder(path) as fresh:
            self.storage.dumps(fresh / "storage", int(self._filled().filled))
            save_archive(self._metadata(), fresh / _STATE)

    def loads(self, path: str | Path) -> None:
        """Restore the state saved by :meth:`dumps`. Checksums are verified, and no code in the files is executed.

        Raises:
            ArgumentError: the save is from a buffer of another size or format, is missing or damaged, or can't be read.
        """
        self._discard()
        state = load_archive(Path(path) / _STATE)
        with self._lock, readable(f"The saved buffer {path}"):
            state, index = self._converted(state)
            self.storage.loads(Path(path) / "storage")
            self._restore_metadata(state, index)

    def _metadata(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "max_size": self.storage.max_size,
            "ndim": self.storage.ndim,
            "index": None if self._index is None else self._index.state_dict(),
            "keys": self.sampler.keys.state_dict(),
            "sampler": self.sampler.state_dict(),
            "generator": None if self._generator is None else self._generator.get_state(),
        }

    def _converted(self, state: dict[str, Any]) -> tuple[dict[str, Any], TrajectoryIndex | None]:
        """Return a saved state in the current format, and its index."""
        state = converted(state, self.storage, order_has_runs=isinstance(self.sampler, SliceSampler))
        return state, loaded_index(state)

    def _restore_metadata(self, state: dict[str, Any], index: TrajectoryIndex | None) -> None:
        if index is not None and (index.lanes, index.capacity) != (self.storage.lanes, self.storage.capacity):
            raise ArgumentError("The index and the steps of the saved buffer must have the same number of rows.")
        self._index = index
        self.sampler.keys.load_state_dict(state["keys"])
        self.sampler.load_state_dict(state["sampler"])
        if self._generator is not None and state["generator"] is not None:
            self._generator.set_state(state["generator"])


def mark(sample: Step, info: dict[str, Tensor], truncated_key: NestedKey | None) -> None:
    """Mark the starts and ends of slices in a sample ``[N, ...]``, and add the entries of its ``info``."""
    mark_starts(sample, info["starts"])
    if "ends" in info and truncated_key is not None:
        mark_ends(sample, info["ends"], truncated_key)
    inner = (1,) * (sample.ndim - 1)
    for name, key in ENTRIES.items():
        if name in info:
            value = info[name].reshape(-1, *inner).expand(sample.batch_size)
            collected = sample.get(key, None) if key == MASK else None  # absent agents stay masked
            sample.set(key, value if collected is None else value & collected)


def write_states(storage: Storage, index: TrajectoryIndex, positions: Tensor, states: dict[NestedKey, Tensor]) -> None:
    """Write the states after the steps at ``positions``, by root key, to these steps and to the next ones."""
    after: dict[NestedKey, Tensor] = {next_key(key): state for key, state in states.items()}
    storage.write(positions, {key: state for key, state in after.items() if key in storage.keys})
    successors, exists = index.successors(positions)
    storage.write(successors[exists], {key: state[exists.to(state.device)] for key, state in states.items()})
