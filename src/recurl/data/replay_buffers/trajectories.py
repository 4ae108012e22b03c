"""Index of consecutive stored steps, updated in O(new steps) without scanning the storage.

Steps are stored in **lanes** (one per row of a batch ``[*B, T]``, or a single one), each a ring of ``capacity``
positions. A step has a *position* in the storage, ``lane * capacity + offset``, and a *step number*, counted from 0 in
its lane over the lifetime of the buffer. A **run** is a sequence of steps of one trajectory stored without a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from recurl.core.errors import ArgumentError

__all__ = ["Appended", "RunSet", "TrajectoryIndex", "random_below"]

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class Appended:
    """Changes made by an append.

    Attributes:
        positions: positions of the new steps, int64 ``[lanes, n]``.
        shrunk: runs that lost their first steps but not all of them, int64 ``[R]``.
    """

    positions: Ints
    shrunk: Ints


class RunSet:
    """Set of runs with O(1) updates and random sampling per run.

    Attributes:
        members: int64; the first ``count`` entries are the runs of the set, in no particular order.
        count: number of runs in the set.
    """

    def __init__(self, runs: Ints, slots: int) -> None:
        self.members = np.zeros(max(slots, 1), np.int64)
        self.members[: runs.size] = runs
        self.count = int(runs.size)
        self._place = np.full(max(slots, 1), -1, np.int64)
        self._place[runs] = np.arange(runs.size)

    def update(self, runs: Ints, wanted: Bools, slots: int) -> None:
        """Add those of ``runs`` (distinct, below ``slots``) where ``wanted`` is true, and remove the others."""
        if slots > self._place.size:
            self.members = _grown(self.members, slots, 0)
            self._place = _grown(self._place, slots, -1)
        member = self._place[runs] >= 0
        self._remove(runs[member & ~wanted])
        new = runs[wanted & ~member]
        places = np.arange(self.count, self.count + new.size)
        self.members[places] = new
        self._place[new] = places
        self.count += int(new.size)

    def _remove(self, runs: Ints) -> None:
        places = self._place[runs]
        self._place[runs] = -1
        keep = self.count - int(runs.size)
        holes = places[places < keep]
        last = self.members[keep : self.count]
        movers = last[self._place[last] >= 0]
        self.members[holes] = movers
        self._place[movers] = holes
        self.count = keep


class TrajectoryIndex:
    """Index of the runs of stored steps.

    Args:
        lanes: number of lanes.
        capacity: number of positions per lane.

    Attributes:
        written: number of steps ever written to each lane. The write cursor is at offset ``written % capacity``.

    Example:
        >>> index = TrajectoryIndex(lanes=1, capacity=4)
        >>> positions = index.append(np.array([[True, False, False, True, False]])[:, :4]).positions
        >>> index.append(np.array([[False]])).positions.tolist()  # the ring is full: overwrites the oldest step
        [[0]]
        >>> index.continues(np.array([1, 2, 3, 0])).tolist()  # 1 and 2 are one run, 3 and 0 another
        [False, True, False, True]
    """

    def __init__(self, lanes: int, capacity: int) -> None:
        self.lanes = lanes
        self.capacity = capacity
        self.written = 0
        self._base = np.arange(lanes, dtype=np.int64) * capacity
        self._run = np.zeros(lanes * capacity, np.int32)
        self._first = np.zeros(0, np.int64)
        self._stop = np.zeros(0, np.int64)
        self._lane = np.zeros(0, np.int64)
        self._free: list[int] = []
        self._last = np.zeros(lanes, np.int64)
        self._sets: dict[int, RunSet] = {}

    @property
    def filled(self) -> int:
        """Number of steps stored in each lane."""
        return min(self.written, self.capacity)

    def __len__(self) -> int:
        return self.lanes * self.filled

    def check_room(self, count: int) -> None:
        """Check that each lane can hold ``count`` steps added at once.

        Raises:
            ArgumentError: ``count`` exceeds ``capacity``.
        """
        if count > self.capacity:
            raise ArgumentError(
                f"{count} steps can't be stored at once, as there is room for {self.capacity} per row of the batch. "
                "Make max_size larger, or extend in parts."
            )

    def append(self, starts: Bools) -> Appended:
        """Add steps to every lane, overwriting the oldest ones of a full ring.

        Args:
            starts: bool ``[lanes, n]``, True where a step begins a run instead of continuing the previous step.

        Raises:
            ArgumentError: there are more than ``capacity`` steps.
        """
        count = starts.shape[1]
        self.check_room(count)
        if self.written == 0:
            starts = starts.copy()
            starts[:, :1] = True
        steps = np.arange(self.written, self.written + count)
        positions = self._base[:, None] + steps % self.capacity
        lost, losses = np.unique(self._run[positions[:, steps >= self.capacity]], return_counts=True)
        touched = self._add_runs(starts, positions)
        self.written += count
        lost = lost.astype(np.int64)
        self._first[lost] += losses
        empty = lost[self._first[lost] == self._stop[lost]]
        self._free.extend(empty.tolist())
        self._refresh_sets(np.unique(np.concatenate([lost, touched])))
        return Appended(positions, lost[self._first[lost] < self._stop[lost]])

    def _add_runs(self, starts: Bools, positions: Ints) -> Ints:
        """Record the runs of new steps, and return the runs that are new or have grown."""
        lanes, count = starts.shape
        lane, offset = starts.nonzero()
        new = self._allocate(lane.size)
        stop = np.append(offset[1:], count)[: lane.size]
        stop[:-1][lane[1:] != lane[:-1]] = count
        self._first[new], self._stop[new], self._lane[new] = self.written + offset, self.written + stop, lane
        before_first = starts.cumsum(1) == 0
        ordinal = starts.ravel().cumsum().reshape(lanes, count) - 1
        run = np.where(before_first, self._last[:, None], np.append(new, 0)[ordinal])
        continued = before_first.sum(1)
        grown = self._last[continued > 0]
        self._stop[grown] += continued[continued > 0]
        self._run[positions] = run
        if count:
            self._last = run[:, -1].astype(np.int64)
        return np.concatenate([new, grown])

    def _allocate(self, count: int) -> Ints:
        missing = count - len(self._free)
        if missing > 0:
            size = self._first.size
            more = max(missing, size)
            self._first = _grown(self._first, size + more, 0)
            self._stop = _grown(self._stop, size + more, 0)
            self._lane = _grown(self._lane, size + more, 0)
            self._free[:0] = range(size + more - 1, size - 1, -1)
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.array(taken[::-1], np.int64)

    def _refresh_sets(self, runs: Ints) -> None:
        length = self._stop[runs] - self._first[runs]
        for minimum, members in self._sets.items():
            members.update(runs, length >= minimum, self._first.size)

    def runs_of(self, minimum: int) -> RunSet:
        """Return the set of runs of at least ``minimum`` > 0 steps, kept up to date; the first call is O(runs)."""
        if minimum not in self._sets:
            runs = (self._stop - self._first >= minimum).nonzero()[0]
            self._sets[minimum] = RunSet(runs, self._first.size)
        return self._sets[minimum]

    def longest(self) -> int:
        """Return the number of steps of the longest run, 0 if there is none; O(runs)."""
        return int((self._stop - self._first).max(initial=0))

    def bounds(self, runs: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the lane, the first step number, and the last step number plus one of each run."""
        return self._lane[runs], self._first[runs], self._stop[runs]

    def run_at(self, positions: Ints) -> Ints:
        """Return the run of each stored position."""
        return self._run[positions].astype(np.int64)

    def positions(self, lanes: Ints, steps: Ints) -> Ints:
        """Return the positions of steps, given by lane and step number."""
        return lanes * self.capacity + steps % self.capacity

    def steps(self, positions: Ints) -> Ints:
        """Return the step numbers of the steps at ``positions``."""
        newest = self.written - 1
        return newest - (newest - positions % self.capacity) % self.capacity

    def all_positions(self) -> Ints:
        """Return every position that holds a step, int64 ``[len(self)]``."""
        return (self._base[:, None] + np.arange(self.filled)).ravel()

    def nth_position(self, ordinals: Ints) -> Ints:
        """Return the positions of the n-th stored steps, counted lane by lane, as ``all_positions()[ordinals]``."""
        if self.filled == self.capacity:
            return ordinals
        return ordinals // self.filled * self.capacity + ordinals % self.filled

    def continues(self, positions: Ints) -> Bools:
        """Return bool ``[N]``: whether each position holds the step after that of the previous position, in one run."""
        steps, runs = self.steps(positions), self._run[positions]
        result = np.zeros(positions.shape, np.bool_)
        result[1:] = (runs[1:] == runs[:-1]) & (steps[1:] == steps[:-1] + 1)
        return result

    def successors(self, positions: Ints) -> tuple[Ints, Bools]:
        """Return the positions of the next steps, and whether each exists in the same run."""
        runs, steps = self.run_at(positions), self.steps(positions)
        return self.positions(self._lane[runs], steps + 1), steps + 1 < self._stop[runs]

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, as tensors and integers."""
        arrays = {name: torch.from_numpy(getattr(self, name).copy()) for name in _ARRAYS}
        runs = torch.from_numpy(self._run.reshape(self.lanes, -1)[:, : self.filled].copy())
        members = {minimum: torch.from_numpy(runs.members[: runs.count].copy()) for minimum, runs in self._sets.items()}
        sizes = {"lanes": self.lanes, "capacity": self.capacity, "written": self.written}
        return {**sizes, **arrays, "_run": runs, "free": torch.tensor(self._free, dtype=torch.int64), "sets": members}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> TrajectoryIndex:
        """Return an index restored from a :meth:`state_dict`.

        Raises:
            ArgumentError: the state is inconsistent.
        """
        index = cls(state["lanes"], state["capacity"])
        index.written = state["written"]
        for name in _ARRAYS:
            setattr(index, name, state[name].numpy().astype(np.int64))
        runs = state["_run"].numpy().reshape(index.lanes, -1)  # earlier versions saved all positions
        index._run.reshape(index.lanes, -1)[:, : index.filled] = runs[:, : index.filled]
        index._free = state["free"].tolist()
        slots = index._first.size
        numbers = [index._run, index._last, *(members.numpy() for members in state["sets"].values())]
        sound = index._stop.shape == index._lane.shape == (slots,) and index._last.shape == (index.lanes,)
        if not sound or any(((part < 0) | (part >= max(slots, 1))).any() for part in numbers):
            raise ArgumentError("The saved index of trajectories is inconsistent.")
        index._sets = {minimum: RunSet(members.numpy(), slots) for minimum, members in state["sets"].items()}
        return index


_ARRAYS = ("_first", "_stop", "_lane", "_last")


def _grown(values: Ints, size: int, fill: int) -> Ints:
    return np.concatenate([values, np.full(size - values.size, fill, values.dtype)])


def random_below(limits: int | Ints, count: int, generator: torch.Generator | None) -> Ints:
    """Draw ``count`` independent integers, uniform in [0, limit), from a torch generator (default when None)."""
    uniform = torch.rand(count, dtype=torch.float64, generator=generator).numpy()
    return np.minimum((uniform * limits).astype(np.int64), np.asarray(limits) - 1)
