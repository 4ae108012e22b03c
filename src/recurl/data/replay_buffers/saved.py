"""Format of saved buffers, shared by all of them, and conversion of earlier formats."""

from __future__ import annotations

from typing import Any

from recurl.core.errors import ArgumentError
from recurl.core.keys import TRAJ_IDS
from recurl.data.replay_buffers.storage import Storage
from recurl.data.replay_buffers.trajectories import TrajectoryIndex
from recurl.data.replay_buffers.trajectory_keys import TrajectoryKeys

__all__ = ["FORMAT", "converted", "loaded_index"]

FORMAT = 3
_EARLIER = (1, 2)  # with a table of runs; format 2 saves only filled positions


def converted(state: dict[str, Any], storage: Storage, *, order_has_runs: bool = False) -> dict[str, Any]:
    """Return a saved state in the current format.

    Args:
        state: state of a ``ReplayBuffer`` or a ``DeviceSliceBuffer`` of this or an earlier version.
        storage: the storage to load it into.
        order_has_runs: whether ``order`` in the sampler's state has the numbers of runs.

    Raises:
        ArgumentError: the state is from a buffer of another size, or of an unknown format.
    """
    if "ring" in state:
        state = _of_device(state, storage)
    expected = {"max_size": storage.max_size, "ndim": storage.ndim}
    got = {name: state[name] for name in expected}
    if got != expected:
        raise ArgumentError(f"The saved buffer must have {expected}, but has {got}.")
    if state["format"] not in (*_EARLIER, FORMAT):
        raise ArgumentError(
            f"The saved buffer must have a format of {(*_EARLIER, FORMAT)}, but has {state['format']!r}."
        )
    earlier = state["format"] in _EARLIER and state["index"] is not None
    return _of_runs(state, order_has_runs=order_has_runs) if earlier else state


def loaded_index(state: dict[str, Any]) -> TrajectoryIndex | None:
    """Return the index of a state in the current format, on the CPU; None if nothing was stored.

    Raises:
        ArgumentError: the index is inconsistent.
    """
    saved = state["index"]
    if saved is None:
        return None
    lanes, capacity = saved["lanes"], saved["capacity"]
    if type(lanes) is not int or lanes < 1 or type(capacity) is not int or capacity != state["max_size"] // lanes:
        raise ArgumentError("The saved index of trajectories is inconsistent.")
    index = TrajectoryIndex(lanes, capacity)
    index.load_state_dict(saved)
    return index


def _of_runs(state: dict[str, Any], *, order_has_runs: bool) -> dict[str, Any]:
    """Convert a state whose index has a table of runs, and the number of the run of every position."""
    saved, sampler = state["index"], dict(state["sampler"])
    lanes, capacity, written = (saved[name] for name in ("lanes", "capacity", "written"))
    runs = saved["_run"].reshape(lanes, -1)[:, : min(written, capacity)].long()
    heads = saved["_lane"] * capacity + saved["_first"] % capacity
    index = {"lanes": lanes, "capacity": capacity, "written": written, "first": saved["_first"][runs]}
    index["sets"] = {minimum: heads[members] for minimum, members in saved["sets"].items()}
    if order_has_runs and sampler.get("order") is not None:
        sampler["order"] = heads[sampler["order"]]
    return {**state, "format": FORMAT, "index": index, "sampler": sampler}


def _of_device(state: dict[str, Any], storage: Storage) -> dict[str, Any]:
    """Convert a state that was written by a ``DeviceSliceBuffer``."""
    ring, priority = state["ring"], state.get("priority")
    sizes = {"format": FORMAT, "max_size": storage.max_size, "ndim": storage.ndim, "generator": None}
    if ring is None:
        return {**sizes, "index": None, "storage": None, "keys": TrajectoryKeys().state_dict(), "sampler": {}}
    lanes, filled, written = ring["lanes"], ring["first"].shape[1], int(ring["written"])
    room = storage.max_size // lanes if priority is None else priority.numel() // lanes
    capacity = filled if written > filled else room
    index = {"lanes": lanes, "capacity": capacity, "written": written, "first": ring["first"], "sets": {}}
    keys = {"chosen": TRAJ_IDS, "last": state["last"], "cut": False}
    sampler: dict[str, Any] = {}
    if priority is not None:
        sampler = {"max_priority": state["largest"].item(), "priorities": priority, "tree": priority, "length": None}
    return {**sizes, "index": index, "storage": state["storage"], "keys": keys, "sampler": sampler}
