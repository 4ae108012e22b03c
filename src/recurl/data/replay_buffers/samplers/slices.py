"""Sampling of trajectory slices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UsageError
from recurl.core.keys import NEXT, TRUNCATED, NestedKey
from recurl.data.replay_buffers.draws import ByStep, ByTrajectory, Slices, slices_around, slices_within, uniform
from recurl.data.replay_buffers.samplers.base import Draw, Sampler
from recurl.data.replay_buffers.trajectories import TrajectoryIndex, below
from recurl.data.replay_buffers.trajectory_keys import TrajectoryKeys

__all__ = ["SliceSampler", "SliceSize", "Span", "draw_of", "no_slice"]

Span: TypeAlias = bool | int | tuple[bool | int, bool | int]


class SliceSize:
    """Division of a batch into slices, by number or by length.

    Args:
        num_slices: number of slices per batch, or None.
        slice_len: number of steps per slice, or None.

    Raises:
        ArgumentTypeError: not exactly one of the two is given.
        ArgumentError: the number or length is not positive.
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
        """Return the number and length of the slices of a batch.

        Raises:
            UsageError: the batch size is not a multiple of ``num_slices`` or ``slice_len``.
        """
        part = self.num_slices or self.slice_len or 1
        if batch_size % part:
            name = "num_slices" if self.num_slices else "slice_len"
            raise UsageError(
                f"The batch size must be a multiple of {name}={part}, got {batch_size}: take "
                f"{batch_size + part - batch_size % part}, for instance."
            )
        return (part, batch_size // part) if self.num_slices else (batch_size // part, part)


def draw_of(index: TrajectoryIndex, drawn: Slices, length: int, *, pad: bool = False) -> Draw:
    """Return the draw of slices of at most ``length`` steps, one after another.

    Args:
        index: index of the stored steps.
        drawn: the slices.
        length: maximum number of steps of a slice.
        pad: pad shorter slices with their last step; the draw then has a mask. Each padding step begins its own slice,
            so that no segment continues into padding. Without padding, this waits for the device.
    """
    offsets, lengths = torch.arange(length, device=index.device), drawn.lengths.unsqueeze(-1)
    mask = offsets < lengths
    weights = None if drawn.weights is None else drawn.weights.unsqueeze(-1).expand(mask.shape)
    values = drawn.positions(index, length), (offsets == 0) | ~mask, offsets == lengths - 1, weights
    kept = None if pad or mask.all() else mask.flatten().nonzero().squeeze(-1)
    flat = (None if value is None else value.flatten() for value in values)
    positions, starts, ends, weights = (x if x is None or kept is None else x.index_select(0, kept) for x in flat)
    return Draw(cast(Tensor, positions), starts, ends, mask.flatten() if pad else None, weights)


def no_slice(keys: TrajectoryKeys, index: TrajectoryIndex, length: int) -> MissingKeyError | UsageError:
    """Return the error for a buffer without a trajectory of ``length`` steps."""
    if keys.chosen is None:
        return MissingKeyError(
            "Slices need an entry that identifies trajectories, one value per step: ('collector', 'traj_ids') (as a "
            "Collector writes it), 'episode' or ('next', 'done'); the stored data has none of them. Name another with "
            "traj_key= or end_key=. If each item holds several steps, extend with data.reshape(-1), or use ndim=2."
        )
    return UsageError(
        f"No stored trajectory has {length} steps, the longest has {index.longest()}. Collect more steps, sample "
        "shorter slices, or allow slices of shorter trajectories with strict_length=False."
    )


class SliceSampler(Sampler):
    """Draws slices: first a trajectory and then a start within it, uniformly; or a step and a slice around it.

    A sample is flat, ``[N]``, its slices one after another; in recurrent mode each is one segment that starts from the
    state stored at its first step. The buffer sets ``"is_init"`` at every slice start, and ``truncated_key`` (and the
    sibling ``"done"``) at every slice end. No slice crosses the end of a trajectory or the write cursor. Stored steps
    form one trajectory only if they were added without a gap. The time per sample does not depend on the number of
    stored steps.

    Args:
        num_slices: number of slices per batch. Exactly one of ``num_slices`` and ``slice_len`` must be given, and the
            batch size must be a multiple of it.
        slice_len: number of steps per slice.
        traj_key: entry that identifies the trajectory of a step. If neither ``traj_key`` nor ``end_key`` is given, the
            first of ``("collector", "traj_ids")``, ``"episode"`` and ``("next", "done")`` in the data is used.
        end_key: entry that is True at the last step of a trajectory.
        truncated_key: entry that is set at slice ends; None to leave the done flags unchanged.
        strict_length: draw only from trajectories of at least ``slice_len`` steps. If False, shorter ones yield shorter
            slices, and a batch may have fewer steps than the batch size.
        pad_output: (with ``strict_length=False``) pad shorter slices with their last step, and always write
            ``("collector", "mask")``, bool ``[N]``, False at padding; each padding step is its own segment.
        span: let slices extend beyond the beginning and the end of a trajectory, where they are cut off, so that its
            first and last steps are drawn as often as others: True for any number of steps, an integer for at most that
            many, or a pair (beginning, end).
        by_step: draw a step uniformly, and a slice that contains it at a random offset, shifted to stay within its
            trajectory, so that all steps are drawn about equally often. Otherwise steps of long trajectories are drawn
            less often than those of short ones, and the first and last steps of a trajectory, which few slices contain,
            less often still.
        replacement: if False, each trajectory yields at most one slice per epoch, and iterating over the buffer yields
            one epoch, whose last batch may be incomplete. Extending the buffer starts a new epoch.

    Raises:
        ArgumentTypeError: not exactly one of ``num_slices`` and ``slice_len`` is given.
        ArgumentError: ``pad_output`` is set with ``strict_length``; ``by_step`` is set without replacement or with
            ``span``; both keys are given; or ``span`` is negative.
        UsageError: (when sampling) no trajectory is long enough, or the batch size is not a multiple of the slices.
        MissingKeyError: (when extending or sampling) the data has no entry that identifies trajectories.

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
        by_step: bool = False,
    ) -> None:
        super().__init__(TrajectoryKeys(traj_key, end_key), truncated_key)
        self.size = SliceSize(num_slices, slice_len)
        if pad_output and strict_length:
            raise ArgumentError(
                "pad_output=True needs strict_length=False: with strict_length=True there is nothing to pad."
            )
        if by_step and not replacement:
            raise ArgumentError(
                "by_step=True needs replacement=True: without it each trajectory is drawn once, regardless of length."
            )
        if by_step and span is not False:
            raise ArgumentError(f"by_step=True keeps slices within their trajectories: omit span, got {span}.")
        self.strict_length = strict_length
        self.by_step = by_step
        self.pad_output = pad_output
        self.span = _pair(span)
        self.replacement = replacement
        self._order: Tensor | None = None  # positions of the first steps of trajectories

    def draw(self, index: TrajectoryIndex, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw a batch of steps."""
        count, length = self.size.divide(batch_size)
        if self.keys.chosen is None:
            raise no_slice(self.keys, index, length)
        drawn = self._slices(index, count, length, generator)
        result = draw_of(index, drawn, length, pad=self.pad_output)
        if self._order is None or len(self._order):
            return result
        self._order = None
        return replace(result, last=True)

    def _slices(self, index: TrajectoryIndex, count: int, length: int, generator: torch.Generator | None) -> Slices:
        if self.replacement and not self.strict_length and self.span == (0, 0):
            return (ByStep() if self.by_step else ByTrajectory()).draw(index, count, length, generator)
        least = length if self.strict_length else 1
        candidates = index.runs_of(least)
        if candidates.count == 0:
            raise no_slice(self.keys, index, length)
        if self.by_step:
            return slices_around(index, _steps_of_long_runs(index, count, least, generator), length, generator)
        if self.replacement:
            runs = candidates.members[below(candidates.count, uniform(count, index, generator))].long()
        else:
            if self._order is None:
                permutation = torch.randperm(candidates.count, generator=generator)
                self._order = index.first_positions(candidates.members[permutation].long())
            runs, self._order = index.run_at(self._order[:count]), self._order[count:]
        return slices_within(index, runs, length, generator, self.span)

    def appended(self, index: TrajectoryIndex, positions: Tensor) -> None:
        """Begin a new epoch, as the stored steps have changed."""
        self.start_epoch()

    def start_epoch(self) -> None:
        """Begin a new epoch."""
        self._order = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain Python values."""
        return {"order": None if self._order is None else self._order.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""
        order = state.get("order")
        self._order = None if order is None else order.clone()


def _steps_of_long_runs(index: TrajectoryIndex, count: int, least: int, generator: torch.Generator | None) -> Tensor:
    """Draw positions of steps uniformly from runs of at least ``least`` steps."""
    found = torch.zeros(0, dtype=torch.int64)
    while len(found) < count:
        positions = index.nth_position(below(len(index), uniform(count, index, generator)))
        _, first, stop = index.bounds(index.run_at(positions))
        found = torch.cat([found, positions[stop - first >= least]])
    return found[:count]


def _pair(span: Span) -> tuple[int, int]:
    """Return the numbers of steps by which slices may extend beyond the beginning and the end; True means no limit."""
    first, last = span if isinstance(span, tuple) else (span, span)
    unlimited = torch.iinfo(torch.int64).max
    before, after = (unlimited if side is True else int(side) for side in (first, last))
    if min(before, after) < 0:
        raise ArgumentError(f"span must be a bool, a number of steps, or a pair of these; got {span}.")
    return before, after
