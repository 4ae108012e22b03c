"""Index of consecutive stored steps, as tensors, updated in O(new steps) without scanning the storage.

Steps are stored in **lanes** (one per row of a batch ``[*B, T]``, or a single one), each a ring of ``capacity``
positions. A step has a *position* in the storage, ``lane * capacity + offset``, and a *step number*, counted from 0 in
its lane over the lifetime of the buffer. All lanes are written together, so they share one count of steps. A **run** is
a sequence of steps of one trajectory stored without a gap. The runs of a lane are a ring, too: a lane has room for
``capacity`` of them, and a run has the number ``lane * capacity + slot``.

Nothing here waits for the device and no shape depends on data, except where a method says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError

__all__ = ["RunSet", "TrajectoryIndex", "below"]


def below(limits: Tensor | int, uniform: Tensor) -> Tensor:
    """Map float64 numbers, uniform in [0, 1), to integers in [0, limits).

    Example:
        >>> below(torch.tensor([2, 3]), torch.tensor([0.5, 0.0], dtype=torch.float64)).tolist()
        [1, 0]
    """
    return (uniform * limits).long().clamp_max(limits - 1)


class RunSet:
    """Set of runs with O(1) updates and random sampling per run, on the CPU.

    Attributes:
        members: int32; the first ``count`` entries are the runs of the set, in no particular order.
        count: number of runs in the set.
    """

    def __init__(self, runs: Tensor, size: int) -> None:
        self.count = runs.numel()
        self.members = torch.zeros(size, dtype=torch.int32)
        self.members[: self.count] = runs.int()
        self._place = torch.full((size,), -1, dtype=torch.int32)
        self._place[runs] = torch.arange(self.count, dtype=torch.int32)

    def update(self, runs: Tensor, wanted: Tensor) -> None:
        """Add those of ``runs`` (distinct) where ``wanted`` is true, and remove the others."""
        member = self._place[runs] >= 0
        self._remove(runs[member & ~wanted])
        new = runs[wanted & ~member]
        end = self.count + new.numel()
        self.members[self.count : end] = new.int()
        self._place[new] = torch.arange(self.count, end, dtype=torch.int32)
        self.count = end

    def _remove(self, runs: Tensor) -> None:
        places = self._place[runs]
        self._place[runs] = -1
        keep = self.count - runs.numel()
        holes = places[places < keep]
        last = self.members[keep : self.count].long()
        movers = last[self._place[last] >= 0]
        self.members[holes.long()] = movers.int()
        self._place[movers] = holes
        self.count = keep


class TrajectoryIndex:
    """Index of the runs of stored steps.

    Args:
        lanes: number of lanes.
        capacity: number of positions per lane.
        device: where the tensors are.

    Attributes:
        written: number of steps ever written to each lane, int64 scalar.

    Example:
        >>> index = TrajectoryIndex(lanes=1, capacity=4)
        >>> index.append(torch.tensor([[True, False, False, True]])).tolist()
        [[0, 1, 2, 3]]
        >>> index.append(torch.tensor([[False]])).tolist()  # full: overwrites the oldest step
        [[0]]
        >>> index.continues(torch.tensor([1, 2, 3, 0])).tolist()  # 1 and 2 are one run, 3 and 0 another
        [False, True, False, True]
        >>> [part.tolist() for part in index.bounds(index.run_at(torch.arange(4)))]  # lanes, first steps, stops
        [[0, 0, 0, 0], [3, 1, 1, 3], [5, 3, 3, 5]]
    """

    def __init__(self, lanes: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self.lanes = lanes
        self.capacity = capacity
        self.written = torch.zeros((), dtype=torch.int64, device=device)
        self._base = torch.arange(lanes, device=device) * capacity
        self._slot = torch.zeros(lanes * capacity, dtype=torch.int32, device=device)  # of the run at each position
        self._first = torch.zeros(lanes * capacity, dtype=torch.int64, device=device)  # step number by run
        self._newest = torch.full((lanes,), capacity - 1, device=device)  # slot of the newest run of each lane
        self._sets: dict[int, RunSet] = {}

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.written.device

    @property
    def filled(self) -> Tensor:
        """Number of steps stored in each lane, int64 scalar."""
        return self.written.clamp_max(self.capacity)

    @property
    def oldest(self) -> Tensor:
        """Step number of the oldest stored step of each lane, int64 scalar."""
        return (self.written - self.capacity).clamp_min(0)

    def __len__(self) -> int:
        """Return the number of stored steps; this waits for the device."""
        return self.lanes * int(self.filled)

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

    def append(self, starts: Tensor) -> Tensor:
        """Add steps to every lane, overwriting the oldest ones of a full ring, and return their positions.

        Args:
            starts: bool ``[lanes, n]``, True where a step begins a run instead of continuing the previous step.

        Raises:
            ArgumentError: there are more than ``capacity`` steps.
        """
        count = starts.shape[1]
        self.check_room(count)
        steps = self.written + torch.arange(count, device=self.device)
        positions = self._base.unsqueeze(-1) + steps % self.capacity
        if count == 0:
            return positions
        overwritten = self.run_at(positions.flatten()) if self._sets else None
        starts = starts | (steps == 0)
        first = torch.where(starts, steps, self._first[self._base + self._newest].unsqueeze(-1)).cummax(1).values
        slots = (self._newest.unsqueeze(-1) + starts.cumsum(1)) % self.capacity
        runs = (self._base.unsqueeze(-1) + slots).flatten()
        self._slot.index_copy_(0, positions.flatten(), slots.int().flatten())
        self._first.scatter_(0, runs, first.flatten())  # equal values where a run occurs repeatedly
        self._newest.copy_(slots[:, -1])
        self.written.add_(count)
        if overwritten is not None:
            changed = torch.cat([overwritten, runs, self._base + self._oldest_slots()]).unique()
            lengths = self._lengths(changed)
            for minimum, members in self._sets.items():
                members.update(changed, lengths >= minimum)
        return positions

    def positions(self, lanes: Tensor, steps: Tensor) -> Tensor:
        """Return the positions of steps, given by lane and step number."""
        return lanes * self.capacity + steps % self.capacity

    def steps(self, positions: Tensor) -> Tensor:
        """Return the step numbers of the steps at ``positions``; negative where nothing is stored."""
        newest = self.written - 1
        return newest - (newest - positions) % self.capacity

    def nth_position(self, ordinals: Tensor) -> Tensor:
        """Return the positions of the n-th stored steps, counted lane by lane, as ``all_positions()[ordinals]``."""
        return ordinals // self.filled * self.capacity + ordinals % self.filled

    def all_positions(self) -> Tensor:
        """Return every position that holds a step, int64 ``[len(self)]``; this waits for the device."""
        return (self._base.unsqueeze(-1) + torch.arange(int(self.filled), device=self.device)).flatten()

    def newest_positions(self, count: int) -> Tensor:
        """Return the positions of the ``count`` newest steps of each lane; fewer stored ones leave other positions."""
        return self.positions(
            self._base.unsqueeze(-1) // self.capacity, self.written - 1 - torch.arange(count, device=self.device)
        ).flatten()

    def oldest_positions(self) -> Tensor:
        """Return the positions of the oldest stored step of each lane."""
        return self._base + self.oldest % self.capacity

    def run_at(self, positions: Tensor) -> Tensor:
        """Return the run of each position."""
        return positions - positions % self.capacity + self._slot[positions]

    def bounds(self, runs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the lane, the first stored step number, and the last step number plus one of each run."""
        lanes, slots = runs // self.capacity, runs % self.capacity
        following = runs - slots + (slots + 1) % self.capacity
        stop = torch.where(slots == self._newest[lanes], self.written, self._first[following])
        return lanes, self._first[runs].maximum(self.oldest), stop

    def nth_run(self, ordinals: Tensor, counts: Tensor) -> Tensor:
        """Return the n-th stored runs, counted lane by lane from the oldest, given the :meth:`run_counts`."""
        ends = counts.cumsum(0)
        lanes = torch.searchsorted(ends, ordinals, right=True)
        before = torch.where(lanes > 0, ends[lanes - 1], 0)
        return lanes * self.capacity + (self._oldest_slots()[lanes] + ordinals - before) % self.capacity

    def run_counts(self) -> Tensor:
        """Return the number of stored runs of each lane, int64 ``[lanes]``; the buffer must not be empty."""
        return (self._newest - self._oldest_slots()) % self.capacity + 1

    def runs_of(self, minimum: int) -> RunSet:
        """Return the set of runs of at least ``minimum`` > 0 steps, kept up to date; the first call is O(runs).

        The index must be on the CPU.
        """
        if minimum not in self._sets:
            runs = self._all_runs()
            self._sets[minimum] = RunSet(runs[self._lengths(runs) >= minimum], self.lanes * self.capacity)
        return self._sets[minimum]

    def longest(self) -> int:
        """Return the number of steps of the longest run, 0 if there is none; O(runs), and waits for the device."""
        return int(self._lengths(self._all_runs()).max()) if len(self) else 0

    def continues(self, positions: Tensor) -> Tensor:
        """Return bool ``[N]``: whether each position holds the step after that of the previous position, in one run."""
        steps, runs = self.steps(positions), self.run_at(positions)
        result = torch.zeros_like(positions, dtype=torch.bool)
        result[1:] = (runs[1:] == runs[:-1]) & (steps[1:] == steps[:-1] + 1)
        return result

    def successors(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of the next steps, and whether each exists in the same run."""
        steps = self.steps(positions) + 1
        lanes, _, stop = self.bounds(self.run_at(positions))
        return self.positions(lanes, steps), steps < stop

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, as tensors and integers.

        ``first`` has the first step number of the run of each filled position, ``[lanes, filled]``; ``sets`` has the
        positions of the first stored steps of the members.
        """
        runs = self.run_at(self.all_positions()).reshape(self.lanes, -1)
        sets = {minimum: members.members[: members.count].long() for minimum, members in self._sets.items()}
        return {
            "lanes": self.lanes,
            "capacity": self.capacity,
            "written": int(self.written),
            "first": self._first[runs],
            "sets": {minimum: self.first_positions(members) for minimum, members in sets.items()},
        }

    def first_positions(self, runs: Tensor) -> Tensor:
        """Return the positions of the first stored steps of runs."""
        lanes, first, _ = self.bounds(runs)
        return self.positions(lanes, first)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict` in place.

        Raises:
            ArgumentError: the state is of an index of another size, or inconsistent.
        """
        first = state["first"].to(self.device)
        written, filled = state["written"], first.shape[1] if first.ndim == 2 else -1
        sound = (state["lanes"], state["capacity"]) == (self.lanes, self.capacity) and type(written) is int
        if (
            not sound
            or first.dtype != torch.int64
            or first.shape[0] != self.lanes
            or filled != min(max(written, 0), self.capacity)
        ):
            raise _inconsistent()
        steps = written - filled + torch.arange(filled, device=self.device)
        offsets = steps % self.capacity
        first = first[:, offsets]  # from the oldest to the newest step
        starts = first == steps
        if filled:
            starts[:, 0] = True
            kept = torch.where(starts, first, -1).cummax(1).values
            if (first != kept).any() or (first > steps).any() or (first < 0).any():
                raise _inconsistent()
        self.written.fill_(written)
        slots = (starts.cumsum(1) - 1) % self.capacity
        self._slot[(self._base.unsqueeze(-1) + offsets).flatten()] = slots.int().flatten()
        self._first[(self._base.unsqueeze(-1) + slots).flatten()] = first.flatten()
        self._newest.copy_(slots[:, -1] if filled else torch.full_like(self._newest, self.capacity - 1))
        if any(((part < 0) | (part >= self._slot.numel())).any() for part in state["sets"].values()):
            raise _inconsistent()
        size = self._slot.numel()
        self._sets = {minimum: RunSet(self.run_at(part), size) for minimum, part in state["sets"].items()}

    def _all_runs(self) -> Tensor:
        if not len(self):
            return self._base[:0]
        counts = self.run_counts()
        return self.nth_run(torch.arange(int(counts.sum()), device=self.device), counts)

    def _oldest_slots(self) -> Tensor:
        return self._slot[self.oldest_positions()]

    def _lengths(self, runs: Tensor) -> Tensor:
        """Return the number of stored steps of each run, 0 for runs that are no longer stored."""
        lanes, first, stop = self.bounds(runs)
        age = (self._newest[lanes] - runs % self.capacity) % self.capacity
        return torch.where(age < self.run_counts()[lanes], stop - first, 0)


def _inconsistent() -> ArgumentError:
    return ArgumentError("The saved index of trajectories is inconsistent.")
