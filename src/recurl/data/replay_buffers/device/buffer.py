"""Replay buffer on a device: steps, draws and priorities never pass through the host."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.errors import ArgumentError, MissingKeyError, UsageError
from recurl.core.keys import IS_INIT, LAST_STEP, MASK, NEXT, STORED, TRAJ_IDS, TRAJ_STEPS, TRUNCATED, NestedKey
from recurl.data.replay_buffers.device.draws import ByPriority, Drawing, Drawn
from recurl.data.replay_buffers.device.ring import Ring
from recurl.data.replay_buffers.storages import LazyTensorStorage
from recurl.sequences.entries import Entries, leaves
from recurl.sequences.sample_marks import INDEX, PRIORITY_WEIGHT, mark_ends, mark_starts
from recurl.sequences.start_states import refuse

__all__ = ["DeviceSliceBuffer"]

_FORMAT = 1


class DeviceSliceBuffer:
    """Ring buffer of collected batches that samples slices of one length on its device.

    Slices, marks, weights and probabilities are those of a :class:`~recurl.data.ReplayBuffer` with a ``SliceSampler``
    or ``PrioritizedSliceSampler`` with ``strict_length=False`` and ``pad_output=True``. The index consists of tensors:
    extending and sampling never wait for the device and have fixed shapes, so they can be part of a CUDA graph. Random
    numbers come from torch's default generator of the device.

    Args:
        max_size: capacity in steps, divided among the rows of the batches.
        slices: number of slices per sample, S.
        slice_length: number of steps per slice, L; a shorter trajectory is taken as a whole and padded.
        drawing: sampling rule: ``ByStep()``, ``ByTrajectory()`` or ``ByPriority(...)``.
        device: device of the buffer and its samples.

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
        self, max_size: int, slices: int, slice_length: int, drawing: Drawing, device: torch.device | str = "cpu"
    ) -> None:
        if slices < 1 or slice_length < 1:
            raise ArgumentError(f"slices and slice_length must be positive, got {slices} and {slice_length}.")
        self.slices = slices
        self.slice_length = slice_length
        self.drawing = drawing
        self.device = torch.device(device)
        self._storage = LazyTensorStorage(max_size, device=device, ndim=2, share_next_images=False)
        self._ring: Ring | None = None
        self._last: dict[NestedKey, Tensor] = {}
        self._offsets = torch.arange(slice_length, device=device)

    def __len__(self) -> int:
        """Return the number of stored steps; this waits for the device."""
        return 0 if self._ring is None else int(self._ring.filled) * self._ring.lanes

    def extend(self, batch: TensorDictBase) -> None:
        """Add a collected batch ``[B, T]`` on the device, overwriting the oldest steps if the buffer is full.

        Raises:
            ArgumentError: there are more steps than a row of the buffer can hold; the entries differ from the stored
                ones; the batch has another shape or device, or is a sample of a buffer.
            MissingKeyError: the batch lacks ``("collector", "traj_ids")``.
            UsageError: recurrent states are stored only at some steps; see ``sequence_length`` of ``Collector``.
        """
        refuse(batch, "A replay buffer")
        self._check(batch)
        self._storage.prepare(batch)
        ring = self._prepared(batch.batch_size[0])
        if batch.batch_size[1] > ring.capacity:
            raise ArgumentError(
                f"{batch.batch_size[1]} steps can't be stored at once, as there is room for {ring.capacity} per row of "
                "the batch. Make max_size larger, or extend in parts."
            )
        positions = ring.append(self._starts(batch)).flatten()
        self._storage.set(positions, batch)
        if isinstance(self.drawing, ByPriority):
            self.drawing.appended(positions)

    def sample(self) -> Entries:
        """Return a sample, ``Entries`` ``[S, L]`` with one slice per row.

        In addition to the stored entries, it has those of a sample of a :class:`~recurl.data.ReplayBuffer`:
        ``"index"``, ``("collector", "mask")``, ``("collector", "stored")``, and ``"priority_weight"`` with priorities.
        Losses use ``("collector", "last_step")`` to find the ends of slices without reading from the device.

        Raises:
            UsageError: the buffer is empty.
        """
        if self._ring is None:
            raise UsageError("The buffer is empty: extend it first.")
        return self._rows(self._ring, self.drawing.draw(self._ring, self.slices, self.slice_length))

    def update_priority(self, sample: Entries, priority: Tensor, good: Tensor) -> None:
        """Set the priorities of the steps of a sample, which must have been drawn after the last :meth:`extend`.

        Args:
            sample: the sample, ``[S, L]``.
            priority: priority of each slice, ``[S]``, finite if ``good``.
            good: bool scalar; if False, nothing changes.

        Raises:
            UsageError: the buffer does not use priorities.
        """
        if not isinstance(self.drawing, ByPriority):
            raise UsageError(f"{type(self.drawing).__name__} draws without priorities: use ByPriority.")
        index = sample.get(INDEX)
        self.drawing.update(index.flatten(), priority.unsqueeze(-1).expand(index.shape).flatten(), good)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state as tensors and plain values; random generators are not included."""
        ring = self._ring
        if ring is None:
            return {"format": _FORMAT, "ring": None}
        filled = int(ring.filled)
        drawing = self.drawing
        prioritized = isinstance(drawing, ByPriority)
        return {
            "format": _FORMAT,
            "ring": {"lanes": ring.lanes, "written": ring.written.clone(), "first": ring.first[:, :filled].clone()},
            "last": {key: value.clone() for key, value in self._last.items()},
            "storage": self._storage.state_dict(filled),
            "priority": drawing.priority.clone() if prioritized else None,
            "largest": drawing.largest.clone() if prioritized else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`, in place if memory is already allocated.

        Raises:
            ArgumentError: the state is from a buffer of another kind or size.
        """
        if state.get("format") != _FORMAT or "ring" not in state:
            raise ArgumentError(
                "The saved buffer must be a DeviceSliceBuffer, but is not: load it into a buffer of its own type."
            )
        if state["ring"] is None:
            return
        self._storage.load_state_dict(state["storage"])
        ring, saved = self._prepared(state["ring"]["lanes"]), state["ring"]["first"]
        drawing = self.drawing
        prioritized = isinstance(drawing, ByPriority)
        if saved.shape[1] > ring.capacity or (prioritized and _shape(state["priority"]) != drawing.priority.shape):
            raise ArgumentError(
                f"The saved buffer must have the size and the sampling rule of this one, {ring.capacity} steps per row "
                f"and {type(drawing).__name__}, but has {saved.shape[1]} steps."
            )
        ring.written.copy_(state["ring"]["written"])
        ring.first[:, : saved.shape[1]].copy_(saved)
        for key, value in state["last"].items():
            self._remember(key, value.to(self.device))
        if isinstance(drawing, ByPriority):
            drawing.priority.copy_(state["priority"])
            drawing.largest.copy_(state["largest"])

    def _prepared(self, lanes: int) -> Ring:
        if self._ring is None:
            self._ring = Ring(lanes, self._storage.capacity, self.device)
            if isinstance(self.drawing, ByPriority):
                self.drawing.prepare(lanes * self._storage.capacity, self.device)
        return self._ring

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

    def _starts(self, batch: TensorDictBase) -> Tensor:
        """Return bool ``[B, T]``, True where a new step doesn't continue the previous one; see ``TrajectoryKeys``."""
        shape = batch.batch_size
        starts = torch.zeros(shape, dtype=torch.bool, device=self.device)
        for key, growth in ((TRAJ_IDS, 0), (TRAJ_STEPS, 1)):
            found = cast(Tensor | None, batch.get(key, None))
            if found is None:
                continue
            numbers = found.reshape(shape)
            last = self._last.get(key, numbers[:, :1] - growth)
            starts |= numbers != torch.cat([last, numbers[:, :-1]], 1) + growth
            self._remember(key, numbers[:, -1:])
        flags = batch.get(IS_INIT, None)
        return starts if flags is None else starts | flags.reshape(shape).bool()

    def _remember(self, key: NestedKey, value: Tensor) -> None:
        """Store the last numbers of all rows, always in the same memory."""
        if key in self._last:
            self._last[key].copy_(value)
        else:
            self._last[key] = value.clone()

    def _rows(self, ring: Ring, drawn: Drawn) -> Entries:
        shape = torch.Size([self.slices, self.slice_length])
        last = drawn.lengths.unsqueeze(-1) - 1
        inside, steps = self._offsets <= last, drawn.first.unsqueeze(-1) + self._offsets.minimum(last)
        index = ring.positions(drawn.lanes.unsqueeze(-1), steps).flatten()
        flat = Entries({}, index.shape, self.device)
        for key, value in self._storage.entries(index).items():
            flat.set(key, value)
        mark_starts(flat, ((self._offsets == 0) | ~inside).flatten())  # each padding step is its own segment
        mark_ends(flat, (self._offsets == last).flatten(), (NEXT, TRUNCATED))
        flat.set(INDEX, index)
        flat.set(MASK, inside.flatten())
        rows = torch.arange(self.slices, device=self.device).unsqueeze(-1) * self.slice_length
        flat.set(LAST_STEP, (rows + last).expand(shape).flatten())
        if drawn.weights is not None:
            flat.set(PRIORITY_WEIGHT, drawn.weights.float().unsqueeze(-1).expand(shape).flatten())
        sample = Entries({}, shape, self.device)
        for key, value in leaves(flat):
            sample.set(key, value.unflatten(0, shape))
        return sample


def _shape(priority: Tensor | None) -> torch.Size | None:
    return None if priority is None else priority.shape
