"""Replay buffer of the trainers: steps, draws and priorities never pass through the host."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.errors import ArgumentError, MissingKeyError, UsageError
from recurl.core.keys import LAST_STEP, NEXT, STORED, TRAJ_IDS, TRUNCATED, NestedKey
from recurl.data.replay_buffers.buffers import mark, write_states
from recurl.data.replay_buffers.draws import Drawing, Priorities
from recurl.data.replay_buffers.folders import readable
from recurl.data.replay_buffers.samplers.slices import draw_of
from recurl.data.replay_buffers.saved import FORMAT, converted
from recurl.data.replay_buffers.storages import LazyTensorStorage
from recurl.data.replay_buffers.trajectories import TrajectoryIndex
from recurl.data.replay_buffers.trajectory_keys import TrajectoryKeys
from recurl.sequences.continuity import check_order
from recurl.sequences.entries import Entries, leaves
from recurl.sequences.sample_marks import INDEX, without_unstored_steps
from recurl.sequences.start_states import refuse

__all__ = ["DeviceSliceBuffer"]


class DeviceSliceBuffer:
    """Ring buffer of collected batches that samples slices of one length on its device.

    Slices, marks, weights and probabilities are those of a :class:`~recurl.data.ReplayBuffer` with a ``SliceSampler``
    or ``PrioritizedSliceSampler`` with ``strict_length=False``. The index consists of tensors: extending and sampling
    never wait for the device and have fixed shapes, so they can be part of a CUDA graph. Random numbers come from
    torch's default generator of the device.

    Without padding, samples are flat, extending and sampling wait for the device, and an image under ``"next"`` is
    stored once; see :class:`~recurl.data.LazyTensorStorage`. On a CPU, this saves computing with padding.

    Args:
        max_size: capacity in steps, divided among the rows of the batches.
        slices: number of slices per sample, S.
        slice_length: number of steps per slice, L; a shorter trajectory is taken as a whole and padded.
        drawing: sampling rule: ``ByStep()``, ``ByTrajectory()`` or ``ByPriority(...)``.
        device: device of the buffer and its samples.
        padded: pad samples.

    Attributes:
        storage: storage of the steps.

    Raises:
        ArgumentError: a size is not positive.

    Example:
        >>> from tensordict import TensorDict
        >>> from recurl.data.replay_buffers.device import ByStep
        >>> buffer = DeviceSliceBuffer(100, 2, 3, ByStep())
        >>> ids = torch.arange(4).expand(2, 4) // 2 + torch.tensor([[0], [2]])  # two trajectories of two steps a row
        >>> batch = TensorDict({"step": torch.arange(8).reshape(2, 4), "collector": {"traj_ids": ids}}, [2, 4])
        >>> buffer.extend(batch)
        >>> sample = buffer.sample()
        >>> sample["step"].shape, sample["collector", "mask"].tolist()
        (torch.Size([2, 3]), [[True, True, False], [True, True, False]])
    """

    def __init__(
        self,
        max_size: int,
        slices: int,
        slice_length: int,
        drawing: Drawing,
        device: torch.device | str = "cpu",
        *,
        padded: bool = True,
    ) -> None:
        if slices < 1 or slice_length < 1:
            raise ArgumentError(f"slices and slice_length must be positive, got {slices} and {slice_length}.")
        self.slices = slices
        self.slice_length = slice_length
        self.drawing = drawing
        self.device = torch.device(device)
        self.padded = padded
        self.storage = LazyTensorStorage(max_size, device=device, ndim=2, share_next_images=not padded)
        self._index: TrajectoryIndex | None = None
        self._keys = TrajectoryKeys(TRAJ_IDS)

    def __len__(self) -> int:
        """Return the number of stored steps; this waits for the device."""
        return 0 if self._index is None else len(self._index)

    def __getitem__(self, index: slice) -> TensorDictBase:
        """Return a slice of the stored steps, without marks, lane by lane in the order of their positions."""
        return self.storage.get(self._filled().all_positions()[index])

    def extend(self, batch: TensorDictBase) -> None:
        """Add a collected batch ``[B, T]`` on the device, overwriting the oldest steps if the buffer is full.

        Raises:
            ArgumentError: there are more steps than a row of the buffer can hold; the entries differ from the stored
                ones; the batch has another shape or device, or is a sample of a buffer.
            MissingKeyError: the batch lacks ``("collector", "traj_ids")``.
            UsageError: recurrent states are stored only at some steps; see ``sequence_length`` of ``Collector``. Or,
                without padding, the steps are not consecutive; see :func:`~recurl.sequences.continuity.check_order`.
        """
        refuse(batch, "A replay buffer")
        self._check(batch)
        stored = without_unstored_steps(batch, self.storage.keys)
        self.storage.prepare(stored)
        index = self._prepared()
        lanes, count = batch.batch_size
        index.check_room(count)
        starts = self._keys.starts(batch, (lanes, count), device=self.device)
        if not self.padded:
            check_order(batch, starts)
        positions = index.append(starts)
        self.storage.set(positions.flatten(), stored)
        if isinstance(self.drawing, Priorities):
            self.drawing.append(index, positions)

    def sample(self) -> Any:
        """Return a sample: ``Entries`` ``[S, L]`` with one slice per row, or an unpadded TensorDict ``[N]``.

        In addition to the stored entries, it has those of a sample of a :class:`~recurl.data.ReplayBuffer`:
        ``"index"``, ``("collector", "stored")``, and ``"priority_weight"`` with priorities. Padded samples also have
        ``("collector", "mask")``, and ``("collector", "last_step")``, by which losses find the ends of slices without
        reading from the device.

        Raises:
            UsageError: the buffer is empty.
        """
        index, length = self._filled(), self.slice_length
        slices = self.drawing.draw(index, self.slices, length)
        drawn = draw_of(index, slices, length, pad=self.padded)
        sample = Entries({}, drawn.positions.shape, self.device)
        for key, value in self.storage.entries(drawn.positions).items():
            sample.set(key, value)
        mark(sample, drawn.info(), (NEXT, TRUNCATED))
        if not self.padded:
            return sample.to_tensordict()
        last = torch.arange(self.slices, device=self.device) * length + slices.lengths - 1
        sample.set(LAST_STEP, last.unsqueeze(-1).expand(-1, length).flatten())
        shape = torch.Size([self.slices, length])
        rows = Entries({}, shape, self.device)
        for key, value in leaves(sample):
            rows.set(key, value.unflatten(0, shape))
        return rows

    def update_priority(self, sample: Any, priority: Tensor, good: Tensor) -> None:
        """Set the priorities of the steps of a sample, which must have been drawn after the last :meth:`extend`.

        Args:
            sample: the sample, ``[S, L]`` or ``[N]``.
            priority: priority of each slice, ``[S]``, or of each step, ``[N]``; finite if ``good``.
            good: bool scalar; if False, nothing changes.

        Raises:
            UsageError: the buffer does not use priorities.
        """
        if not isinstance(self.drawing, Priorities):
            raise UsageError(f"{type(self.drawing).__name__} draws without priorities: use ByPriority.")
        index = sample.get(INDEX)
        of_steps = priority.reshape(-1, *(1,) * (index.ndim - 1)).expand(index.shape)
        self.drawing.assign(self._filled(), index.flatten(), of_steps.flatten(), good)

    def update_states_(self, sample: TensorDictBase, states: dict[NestedKey, Tensor]) -> None:
        """Overwrite stored states; see :meth:`recurl.data.ReplayBuffer.update_states_`.

        Args:
            sample: an unpadded sample, ``[N]``, drawn after the last :meth:`extend`.
            states: states after each step by root key, ``[N, L * D, H]`` each.
        """
        write_states(self.storage, self._filled(), sample.get(INDEX), states)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, in the format of a ``ReplayBuffer``; random generators are not included."""
        index, drawing = self._index, self.drawing
        return {
            "format": FORMAT,
            "max_size": self.storage.max_size,
            "ndim": self.storage.ndim,
            "index": None if index is None else index.state_dict(),
            "keys": self._keys.state_dict(),
            "sampler": drawing.state_dict() if isinstance(drawing, Priorities) else {},
            "generator": None,
            "storage": None if index is None else self.storage.state_dict(int(index.filled)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`, or that of a ``ReplayBuffer``, in place if memory is already allocated.

        Raises:
            ArgumentError: the state is from a buffer of another size, has no priorities but this buffer does, or can't
                be read.
        """
        with readable("The saved buffer"):
            state = converted(state, self.storage)
            if state["index"] is None:
                return
            if isinstance(self.drawing, Priorities) and "priorities" not in state["sampler"]:
                raise ArgumentError("The saved buffer must have priorities, but was sampled without them.")
            self.storage.load_state_dict(state["storage"])
            index = self._prepared()
            index.load_state_dict({**state["index"], "sets": {}})  # sets would be kept up to date on the host
            self._keys.load_state_dict(state["keys"], self.device)
            if isinstance(self.drawing, Priorities):
                self.drawing.load_state_dict(state["sampler"])
                self.drawing.prepare(index, self.slice_length)

    def _prepared(self) -> TrajectoryIndex:
        if self._index is None:
            lanes, capacity = self.storage.lanes, self.storage.capacity
            self._index = TrajectoryIndex(lanes, capacity, self.device)
            if isinstance(self.drawing, Priorities):
                self.drawing.allocate(lanes * capacity, self.device)
                self.drawing.length = self.slice_length if self.drawing.slices else None
        return self._index

    def _filled(self) -> TrajectoryIndex:
        if self._index is None:
            raise UsageError("The buffer is empty: extend it first.")
        return self._index

    def _check(self, batch: TensorDictBase) -> None:
        ids = batch.get(TRAJ_IDS, None)
        if ids is None:
            raise MissingKeyError(
                f"A batch must have the entry {TRAJ_IDS!r}, which a Collector writes; it has "
                f"{sorted(map(str, batch.keys(True, True)))}."
            )
        if batch.get(STORED, None) is not None:
            raise ArgumentError("A sample of a buffer can't be stored on the device: store collected batches.")
        if batch.batch_dims != 2 or ids.device.type != self.device.type:
            raise ArgumentError(
                f"A batch must be [B, T], on {self.device}, got {list(batch.batch_size)} on {ids.device}."
            )
