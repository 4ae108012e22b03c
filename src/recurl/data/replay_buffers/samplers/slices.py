"""Slices of trajectories."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from recurl.data.replay_buffers.samplers.base import Draw, Sampler
from recurl.data.replay_buffers.trajectories import Appended, Ints, TrajectoryIndex, random_below
from recurl.data.replay_buffers.trajectory_keys import TrajectoryKeys
from recurl.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UsageError
from recurl.keys import NEXT, TRUNCATED, NestedKey

__all__ = ["SliceSampler", "SliceSize", "Span", "no_slice", "slices"]

Span: TypeAlias = bool | int | tuple[bool | int, bool | int]


class SliceSize:
    """How a batch is divided into slices: by their number or by their length.

    Raises:
        ArgumentTypeError: not exactly one of the two is given.
        ArgumentError: it is not positive.
    """

    def __init__(self, num_slices: int | None, slice_len: int | None) -> None:
        if (num_slices is None) == (slice_len is None):
            raise ArgumentTypeError(
                f"Give exactly one of num_slices and slice_len, got num_slices={num_slices} and slice_len={slice_len}."
            )
        if (num_slices or slice_len or 0) < 1:
            raise ArgumentError(f"num_slices and slice_len must be positive, got {num_slices or slice_len}.")
        self.num_slices = num_slices
        self.slice_len = slice_len

    def divide(self, batch_size: int) -> tuple[int, int]:
        """Return number and length of the slices of a batch.

        Raises:
            UsageError: the batch size is no multiple of what was given.
        """
        part = self.num_slices or self.slice_len or 1
        if batch_size % part:
            name = "num_slices" if self.num_slices else "slice_len"
            raise UsageError(
                f"The batch size must be a multiple of {name}={part}, got {batch_size}: take "
                f"{batch_size + part - batch_size % part}, for instance."
            )
        return (part, batch_size // part) if self.num_slices else (batch_size // part, part)


def slices(index: TrajectoryIndex, lanes: Ints, first: Ints, lengths: Ints, pad_to: int | None = None) -> Draw:
    """Return the draw of S slices, one after the other.

    Args:
        index: where steps are stored.
        lanes: int64 ``[S]``.
        first: int64 ``[S]``, the step number at which each slice begins.
        lengths: int64 ``[S]``, positive.
        pad_to: repeat the last step of shorter slices up to this length, and give a mask. A padding step begins a
            slice of its own, so that no segment runs on into padding.
    """
    if pad_to is None:
        begins = np.cumsum(lengths) - lengths
        offsets = np.arange(int(lengths.sum())) - np.repeat(begins, lengths)
        stops = np.repeat(lengths, lengths)
        positions = index.positions(np.repeat(lanes, lengths), np.repeat(first, lengths) + offsets)
        return Draw(positions, offsets == 0, offsets == stops - 1)
    offsets = np.broadcast_to(np.arange(pad_to), (lengths.size, pad_to))
    stops = lengths[:, None]
    positions = index.positions(lanes[:, None], first[:, None] + np.minimum(offsets, stops - 1))
    mask = offsets < stops
    starts, ends = (offsets == 0) | ~mask, offsets == stops - 1
    return Draw(positions.ravel(), starts.ravel(), ends.ravel(), mask.ravel())


def no_slice(keys: TrajectoryKeys, index: TrajectoryIndex, length: int) -> MissingKeyError | UsageError:
    """Return the error for a buffer without a trajectory of ``length`` steps."""
    if keys.chosen is None:
        return MissingKeyError(
            "Slices need an entry that tells trajectories apart, one value per step: ('collector', 'traj_ids') (as a "
            "Collector writes it), 'episode' or ('next', 'done'); the stored data has none of them. Name another with "
            "traj_key= or end_key=. Where each item holds several steps, extend with data.reshape(-1), or use ndim=2."
        )
    return UsageError(
        f"No stored trajectory has {length} steps, the longest has {index.longest()}. Collect more, sample shorter "
        "slices, or take trajectories that are too short as they are with strict_length=False."
    )


class SliceSampler(Sampler):
    """Draws slices: a trajectory uniformly (whatever its length), then a start within it uniformly.

    A sample is flat, ``[N]``, slices one after the other; in recurrent mode each is one segment that starts from the
    state stored at its first step. The buffer raises ``"is_init"`` at every slice start, and ``truncated_key`` (and
    ``"done"`` beside it) at every slice end. No slice crosses a trajectory or the write cursor. What is stored is one
    trajectory as long as it was added without a gap. The time per sample does not depend on the number of stored steps.

    Args:
        num_slices: slices per batch, or
        slice_len: steps per slice; exactly one of the two, and the batch size must be a multiple of it.
        traj_key: entry that says which trajectory a step belongs to, or
        end_key: entry that says that a trajectory ends with a step. By default the first of
            ``("collector", "traj_ids")``, ``"episode"`` and ``("next", "done")`` that the data has.
        truncated_key: raised at slice ends; None leaves the done flags alone.
        strict_length: draw from trajectories of at least ``slice_len`` steps only. If False shorter ones give shorter
            slices, and a batch may have fewer steps than the batch size.
        pad_output: (with ``strict_length=False``) repeat the last step of shorter slices, and always write
            ``("collector", "mask")``, bool ``[N]``, false at padding; each padding step is a segment of its own.
        span: let slices overlap the beginning and the end of a trajectory, where they are cut short, so that its first
            and last steps come as often as others: True down to one step, an integer by so many steps at most, a pair
            for (beginning, end).
        replacement: if False, a trajectory gives at most one slice per epoch, and iterating over the buffer gives one
            epoch; its last batch may be short. Extending the buffer begins a new epoch.

    Raises:
        ArgumentTypeError: not exactly one of ``num_slices`` and ``slice_len``.
        ArgumentError: ``pad_output`` with ``strict_length``, both keys, or a negative span.
        UsageError: when sampling: no trajectory is long enough, or the batch size is no multiple.
        MissingKeyError: when extending or sampling: the data has no entry that tells trajectories apart.

    Example:
        >>> from tensordict import TensorDict
        >>> from recurl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = SliceSampler(slice_len=3)
        >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=6)
        >>> done = (torch.arange(20) % 10 == 9).unsqueeze(-1)
        >>> _ = buffer.extend(TensorDict({"step": torch.arange(20), "next": {"done": done}}, [20]))
        >>> sample = buffer.sample()
        >>> sample["is_init"].squeeze(-1).tolist()
        [True, False, False, True, False, False]
        >>> sample["step"].diff().tolist()[:2]
        [1, 1]
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        traj_key: NestedKey | None = None,
        end_key: NestedKey | None = None,
        truncated_key: NestedKey | None = (NEXT, TRUNCATED),
        strict_length: bool = True,
        pad_output: bool = False,
        span: Span = False,
        replacement: bool = True,
    ) -> None:
        super().__init__(TrajectoryKeys(traj_key, end_key), truncated_key)
        self.size = SliceSize(num_slices, slice_len)
        if pad_output and strict_length:
            raise ArgumentError(
                "With strict_length=True there is nothing to pad: pad_output needs strict_length=False."
            )
        self.strict_length = strict_length
        self.pad_output = pad_output
        self.span = _pair(span)
        self.replacement = replacement
        self._order: Ints | None = None

    def draw(self, index: TrajectoryIndex, batch_size: int, generator: torch.Generator | None) -> Draw:
        """See :meth:`Sampler.draw`."""
        count, length = self.size.divide(batch_size)
        candidates = index.runs_of(length if self.strict_length else 1)
        if self.keys.chosen is None or candidates.count == 0:
            raise no_slice(self.keys, index, length)
        if self.replacement:
            runs = candidates.members[random_below(candidates.count, count, generator)]
        else:
            if self._order is None:
                permutation = torch.randperm(candidates.count, generator=generator).numpy()
                self._order = candidates.members[permutation]
            runs, self._order = np.split(self._order, [count])
        lanes, first, lengths = self._place(index, runs, length, generator)
        drawn = slices(index, lanes, first, lengths, length if self.pad_output else None)
        if self._order is None or self._order.size:
            return drawn
        self._order = None
        return Draw(drawn.positions, drawn.starts, drawn.ends, drawn.mask, last=True)

    def _place(
        self, index: TrajectoryIndex, runs: Ints, length: int, generator: torch.Generator | None
    ) -> tuple[Ints, Ints, Ints]:
        lanes, first, stop = index.bounds(runs)
        available = stop - first
        wanted = np.minimum(length, available)
        before, after = (np.minimum(wanted - 1, side) for side in self.span)
        offset = random_below(available - wanted + before + after + 1, runs.size, generator) - before
        begin = np.maximum(offset, 0)
        return lanes, first + begin, np.minimum(offset + wanted, available) - begin

    def appended(self, index: TrajectoryIndex, change: Appended) -> None:
        """See :meth:`Sampler.appended`."""
        self.start_epoch()

    def start_epoch(self) -> None:
        """See :meth:`Sampler.start_epoch`."""
        self._order = None

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Sampler.state_dict`."""
        return {"order": None if self._order is None else torch.from_numpy(self._order.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`Sampler.load_state_dict`."""
        self._order = None if state["order"] is None else state["order"].numpy().copy()


def _pair(span: Span) -> tuple[int, int]:
    """Return by how many steps slices may overlap beginning and end; there is no limit for True."""
    first, last = span if isinstance(span, tuple) else (span, span)
    unlimited = int(np.iinfo(np.int64).max)
    before, after = (unlimited if side is True else int(side) for side in (first, last))
    if min(before, after) < 0:
        raise ArgumentError(f"span must be a bool, a number of steps, or a pair of these; got {span}.")
    return before, after
