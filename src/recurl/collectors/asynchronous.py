"""Collection by workers, in threads, processes, or Ray actors, with the lag of their weights as a number."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from recurl.collectors.background import CollectorBase, Extendable, units_of
from recurl.collectors.weights import Weights, matching
from recurl.collectors.worker import CollectorInfo
from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError, UsageError
from recurl.core.keys import TRAJ_IDS, NestedKey
from recurl.core.ranges import checked_seed
from recurl.core.spans import WAITING, span
from recurl.envs.rollout import Policy
from recurl.sequences.mode import ExplorationType
from recurl.sequences.trajectories import TRAJECTORY_IDS

__all__ = [
    "AsynchronousCollector",
    "Event",
    "Part",
    "Transport",
    "WorkerOptions",
    "check_arguments",
    "common_info",
    "dimension",
    "joined",
]


class WorkerOptions(TypedDict, total=False):
    """Arguments passed to the :class:`~recurl.collectors.Collector` of each worker."""

    reset_at_each_iter: bool
    set_truncated: bool
    max_frames_per_traj: int | None
    auto_register_policy_transforms: bool
    device: torch.device | str | None
    exploration_type: ExplorationType


class Event(NamedTuple):
    """Event of a worker."""

    worker: int
    kind: Literal["batch", "answer", "lost", "ready"]
    """``"lost"``: the worker failed and is being replaced; ``"ready"``: its replacement has started."""
    value: Any = None
    """The entries of a batch, by key, or the answer to any other request."""


class Transport(Protocol):
    """Connection to the workers, each of which handles one request at a time.

    Attributes:
        infos: properties of the workers' collectors.
        reuses_memory: whether a batch is valid only until its worker begins the next one.
    """

    infos: Sequence[CollectorInfo]
    reuses_memory: bool = False

    def is_idle(self, index: int) -> bool:
        """Return whether a worker can take a request."""
        ...

    def ask(self, index: int, name: str, *arguments: Any) -> None:
        """Send a request to an idle worker: ``collect``, ``seed``, ``save``, ``load``, or ``reset_rows``."""

    def next_event(self) -> Event:
        """Wait for the next event of a worker; of several that are ready, the earliest request is first.

        Raises:
            WorkerError: a worker failed and isn't replaced.
            RecurlError: a worker raised this error.
        """
        ...

    def publish(self, weights: Any) -> None:
        """Set the weights of the batches requested after this call."""

    def own_seed(self, seed: int, index: int) -> int:
        """Return the seed of the global generators of a worker, given the collector's seed."""
        ...

    def close(self) -> None:
        """Stop the workers and release all resources; repeated calls are harmless."""

    def check_open(self) -> None:
        """Check that the workers can be used.

        Raises:
            UsageError: they were stopped, or belong to another process.
        """


class Part(NamedTuple):
    """A batch of one worker."""

    order: int
    """Sequence number of the request."""
    version: int
    """Version of the acting weights."""
    entries: dict[NestedKey, Tensor]


class AsynchronousCollector(CollectorBase):
    """Base class of collectors with workers. It decides when workers collect, and with which weights.

    A worker collects one part at a time. With ``sync``, a batch consists of the next part of every worker, and parts
    may be requested ``max_lag`` batches ahead: with 0, when the batch is requested; with 1, as soon as the previous
    batch is fetched, so that workers act while this process learns. Without ``sync``, a batch is the part of one
    worker, in the order of the requests unless a later one is ready earlier. A worker then begins its next part when
    its previous one is fetched.

    Args:
        connect: starts the workers, given the number of frames of a part and the arguments of their collectors.
        policy: the policy whose weights are sent to workers.
        count: number of workers.
        kind: name of the workers, for messages.
        sync: whether all workers collect each batch together.
        max_lag: maximum number of versions by which the weights of a batch may be older than the newest; None for no
            limit.
        follows: send the current weights whenever a part is requested, rather than when they are handed over.
        cat_results: with ``sync``, ``"stack"``, None, or the dimension of ``[*B, T]`` to concatenate along.
        frames_per_batch: see :class:`~recurl.collectors.Collector`; also the following arguments.
        total_frames: as above.
        init_random_frames: as above, summed over workers.
        postproc: as above.
        replay_buffer: as above.
        storing_device: device of the batches.
        **options: further arguments of the workers' collectors.
    """

    def __init__(  # noqa: PLR0913 - the customary arguments
        self,
        connect: Callable[[dict[str, Any]], Transport],
        policy: Policy | None,
        count: int,
        kind: str,
        *,
        sync: bool,
        max_lag: int | None,
        follows: bool = False,
        cat_results: str | int | None = 0,
        frames_per_batch: int,
        total_frames: int = -1,
        init_random_frames: int = 0,
        postproc: Callable[[TensorDict], Any] | None = None,
        replay_buffer: Extendable | None = None,
        storing_device: torch.device | str = "cpu",
        **options: Unpack[WorkerOptions],
    ) -> None:
        check_arguments(options, init_random_frames, cat_results)
        parts = count if sync else 1
        frames_each = units_of("frames_per_batch", frames_per_batch, parts, f"{parts} {kind}")
        given = {**options, "frames_per_batch": frames_each, "init_random_frames": -(-init_random_frames // count)}
        self._transport = connect(given)
        try:
            self._rows, self.steps_per_batch = common_info(self._transport.infos, kind)
            actual = self.steps_per_batch * self._rows.numel() * parts
            if frames_each * parts != actual:
                units_of("frames_per_batch", frames_per_batch, actual, f"{parts} x {self._rows.numel()} rows")
            self._cat = dimension(cat_results, self._rows) if sync else 0
            super().__init__(actual, total_frames, postproc, replay_buffer)
        except BaseException:
            self._transport.close()
            raise
        self.sync, self.max_lag = sync, max_lag
        self.storing_device: torch.device | None = torch.device(storing_device)
        self.version = 0
        self._kind, self._count = kind, count
        self._policy = policy
        self._source: Any = policy
        self._follows = follows and isinstance(policy, nn.Module)
        # Otherwise the worker's next part begins only after the batch is joined, which copies.
        self._copies = self._transport.reuses_memory and (parts == 1 or max_lag != 0)
        self._sent = False  # whether a worker has received the newest version
        self._order = 0
        self._parts: list[deque[Part]] = [deque() for _ in range(count)]  # received and not delivered
        self._in_progress: dict[int, tuple[int, int]] = {}  # order and version of the parts being collected
        self._lock = threading.Lock()  # of the weights, which another thread may hand over

    # -- the schedule

    def _collect(self) -> TensorDict:
        with span(WAITING):
            parts = self._next_of_all() if self.sync else [self._next_of_any()]
        self.frames += self.frames_per_batch
        if not self.sync:
            self._request_from_idle()
        elif self.max_lag:
            self._request_from_all(self.max_lag - 1)
        shape = [*self._rows, self.steps_per_batch]
        if self._cat is None:
            shape = [len(parts), *shape]
        else:
            shape[self._cat] *= len(parts)
        batch = TensorDict(cast(Any, joined([self._entries(part) for part in parts], self._cat, self._kind)), shape)
        if self.storing_device is not None:
            batch = batch.to(self.storing_device)
        batch.refine_names(..., "time")
        return batch

    def _entries(self, part: Part) -> dict[NestedKey, Tensor]:
        """Return the entries of a part to deliver."""
        return part.entries

    def _remains_after(self, batches: int) -> bool:
        """Return whether a batch may begin ahead of its request when this many others will be delivered before it."""
        return self.total_frames == -1 or self.frames + batches * self.frames_per_batch < self.total_frames

    def _next_of_all(self) -> list[Part]:
        """Wait for the next part of every worker."""
        self.wait()
        return [queue.popleft() for queue in self._parts]

    def wait(self) -> None:
        """Wait for the next batch, which :meth:`collect` will return, with ``sync``; begin it if it hasn't begun."""
        while not all(self._parts):
            self._request_from_all(cast(int, self.max_lag), wanted=1)
            self._receive()

    def _request_from_all(self, ahead: int, *, wanted: int = 0) -> None:
        """Request a part from each idle worker with at most ``ahead`` parts waiting; always up to ``wanted`` parts."""
        for index, queue in enumerate(self._parts):
            waiting = len(queue)
            if waiting <= ahead and (waiting < wanted or self._remains_after(waiting)):
                self._request_if_idle(index)

    def _next_of_any(self) -> Part:
        """Wait for the part requested first, or a later one that may overtake it."""
        while True:
            self._request_from_idle(wanted=1)
            for _, index in sorted((queue[0].order, index) for index, queue in enumerate(self._parts) if queue):
                if self._may_overtake(index):
                    return self._parts[index].popleft()
            self._receive()

    def _request_from_idle(self, *, wanted: int = 0) -> None:
        """Request parts from the idle workers without waiting parts; always up to ``wanted`` parts in total."""
        for index, queue in enumerate(self._parts):
            if not queue and (self._outstanding < wanted or self._remains_after(self._outstanding)):
                self._request_if_idle(index)

    def _may_overtake(self, index: int) -> bool:
        """Return whether delivering a worker's part now would not make any other part too old."""
        if self.max_lag is None:
            return True
        own = self._parts[index][0]
        waiting = [(queue[0].order, queue[0].version) for queue in self._parts if queue]
        others = sorted(part for part in (*waiting, *self._in_progress.values()) if part[0] != own.order)
        if not others or own.order < others[0][0]:
            return True
        return all(version + self.max_lag >= self.version + after for after, (_, version) in enumerate(others, 1))

    @property
    def _outstanding(self) -> int:
        """Number of parts requested but not yet delivered."""
        return len(self._in_progress) + sum(map(len, self._parts))

    def _request_if_idle(self, index: int) -> None:
        if not self._transport.is_idle(index):
            return
        if self._follows:
            self._publish(self._source)
        with self._lock:
            self._transport.ask(index, "collect")
            self._in_progress[index] = (self._order, self.version)
            self._sent = True
        self._order += 1

    def _receive(self) -> Event:
        """Wait for an event of a worker, and update the parts."""
        event = self._transport.next_event()
        if event.kind == "batch":
            entries = {key: value.clone() for key, value in event.value.items()} if self._copies else event.value
            self._parts[event.worker].append(Part(*self._in_progress.pop(event.worker), entries))
        elif event.kind == "lost":
            self._in_progress.pop(event.worker, None)
        return event

    # -- weights

    def update_policy_weights_(self, weights: Weights | None = None) -> None:
        """Send weights to the workers, which use them for the batches that they begin after this call.

        Args:
            weights: module, state dict, or TensorDict of parameters; when None, the policy passed to the constructor.

        Raises:
            UsageError: the policy is not a module, so it has no weights; or the collector was shut down.
            ArgumentError: names or shapes differ from the policy's.
            WorkerError: a worker hangs while it reads the previous weights.
        """
        self._raise_background_error()
        self._check_open()
        if not isinstance(self._policy, nn.Module):
            raise UsageError(f"Only an nn.Module has weights to update, got a policy {type(self._policy).__name__}.")
        if weights is not None:
            matching(weights, self._policy.state_dict())
        self._source = self._policy if weights is None else weights
        if not self._follows:
            self._publish(self._source)

    def _publish(self, weights: Any) -> None:
        """Set the weights of later requests; they are a new version if a worker has received the previous ones."""
        with self._lock:
            self._transport.publish(weights)
            self.version += self._sent
            self._sent = False

    # -- other requests

    def _query(self, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Wait until all workers are idle, and return their answers to one request each."""
        while not all(map(self._transport.is_idle, range(self._count))):
            self._receive()
        answers: dict[int, Any] = {}
        while len(answers) < self._count:
            for index, request in enumerate(requests):
                if index not in answers and self._transport.is_idle(index):
                    self._transport.ask(index, *request)
            event = self._receive()
            if event.kind == "answer":
                answers[event.worker] = event.value
        return [answers[index] for index in range(self._count)]

    def set_seed(self, seed: int) -> None:
        """Seed environments, at their next full reset, and random actions, starting with the next batch.

        Row ``i`` of all workers gets ``seed + i``. The global generators of each worker, from which it draws actions,
        get seeds derived from ``seed`` (:func:`recurl.core.seeding.derive_seed`).
        """
        first = checked_seed(seed)
        rows, own = self._rows.numel(), self._transport.own_seed
        requests = [("seed", first + index * rows, own(first, index)) for index in range(self._count)]
        self._between_batches(lambda: self._query(requests))

    def reset_rows(self, rows: Tensor) -> None:
        """Begin new episodes in some rows, after the batches in progress; see :meth:`Collector.reset_rows`.

        Args:
            rows: mask of the rows to reset, in the order of a batch.

        Raises:
            UnsupportedError: a batch does not have the rows of all workers.
        """
        self._check_idle()
        if not self.sync or (self._count > 1 and self._cat == len(self._rows)):
            raise UnsupportedError(
                f"Rows can be reset only if each batch has the rows of all {self._kind}: use sync=True."
            )
        if self._cat is None:
            parts = rows.unbind(0)
        else:
            parts = rows.chunk(self._count, self._cat) if self._count > 1 else [rows]
        self._query([("reset_rows", part.contiguous()) for part in parts])

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state for exact continuation, after waiting for the batches in progress.

        It has the states of all workers, with their random generators, and the batches that were not delivered, as
        tensors and plain Python values; see :meth:`Collector.state_dict`.
        """
        return self._between_batches(self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        saved = self._query([("save",)] * self._count)
        parts = [[_saved(part) for part in queue] for queue in self._parts]
        return {"frames": self.frames, "version": self.version, "sent": self._sent, "workers": saved, "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a :meth:`state_dict`.

        Returns:
            Whether the states of all environments were restored; see :meth:`Collector.load_state_dict`.

        Raises:
            ArgumentError: the state was saved with another number of workers.
        """
        self._check_idle()
        state = _current(state)
        workers = state["workers"]
        if len(workers) != self._count:
            raise ArgumentError(
                f"The state must be of a collector with {self._count} {self._kind}, got that of {len(workers)}."
            )
        for saved in workers:
            TRAJECTORY_IDS.skip(saved["collector"]["traj_ids"])
        restored = self._query([("load", saved, TRAJECTORY_IDS.reserve()) for saved in workers])
        self.frames, self.version, self._sent = state["frames"], state["version"], state["sent"]
        self._parts = [deque(Part(**_saved(Part(**part))) for part in queue) for queue in state["parts"]]
        self._order = 1 + max((part.order for queue in self._parts for part in queue), default=-1)
        return all(restored)

    def _prepare_background(self) -> None:
        """Do nothing, as workers have their own policies."""

    def _check_open(self) -> None:
        super()._check_open()
        self._transport.check_open()

    def _close(self) -> None:
        self._transport.close()


def _saved(part: Part) -> dict[str, Any]:
    """Return a part with copies of its entries, which will be delivered or overwritten by its worker."""
    return {**part._asdict(), "entries": {key: value.clone() for key, value in part.entries.items()}}


def common_info(infos: Sequence[CollectorInfo], kind: str = "workers") -> CollectorInfo:
    """Return the properties that the workers' collectors share.

    Raises:
        ArgumentError: the batch sizes of their environments differ.
    """
    for index, info in enumerate(infos):
        if info != infos[0]:
            one = kind.removesuffix("s")
            raise ArgumentError(
                f"The environments of all {kind} must have the same batch size: that of {one} {index} is "
                f"{list(info.rows)}, that of {one} 0 is {list(infos[0].rows)}."
            )
    return infos[0]


def check_arguments(options: Mapping[str, object], init_random_frames: int, cat_results: str | int | None) -> None:
    """Check arguments before any worker starts.

    Raises:
        ArgumentError: ``init_random_frames`` is negative, or ``cat_results`` is a string other than ``"stack"``.
        ArgumentTypeError: an argument is not among :class:`WorkerOptions`.
    """
    unknown = sorted(options.keys() - WorkerOptions.__annotations__.keys())
    if unknown:
        known = sorted(WorkerOptions.__annotations__)
        raise ArgumentTypeError(f"Unknown arguments {unknown}: further arguments must be among {known}.")
    if init_random_frames < 0:
        raise ArgumentError(f"init_random_frames must not be negative, got {init_random_frames}.")
    if isinstance(cat_results, str) and cat_results != "stack":
        raise ArgumentError(f"cat_results must be 'stack', None or a dimension, got {cat_results!r}.")


def dimension(cat_results: str | int | None, rows: torch.Size) -> int | None:
    """Return the dimension of ``[*B, T]`` to concatenate along, or None to stack.

    Raises:
        ArgumentError: there is no such dimension.
    """
    if not isinstance(cat_results, int):
        return None
    ndim = len(rows) + 1
    if not -ndim <= cat_results < ndim:
        raise ArgumentError(f"cat_results must be a dimension of a worker's batch {[*rows, 'T']}, got {cat_results}.")
    return cat_results % ndim


def joined(parts: Sequence[dict[NestedKey, Tensor]], dim: int | None, kind: str = "workers") -> dict[NestedKey, Tensor]:
    """Combine the entries of several parts: stacked when ``dim`` is None, else concatenated along it.

    Raises:
        ArgumentError: the parts differ in their entries.

    Example:
        >>> joined([{"x": torch.ones(2)}] * 2, 0)
        {'x': tensor([1., 1., 1., 1.])}
    """
    if len(parts) == 1 and dim is not None:
        return parts[0]
    kinds = [{key: (value.dtype, value.shape) for key, value in part.items()} for part in parts]
    for index, other in enumerate(kinds):
        for key in {**kinds[0], **other} if other != kinds[0] else ():
            found = [f"{x[0]} {list(x[1])}"[6:] if (x := each.get(key)) else "missing" for each in (kinds[0], other)]
            if found[0] != found[1]:
                one = kind.removesuffix("s")
                raise ArgumentError(
                    f"The batches of all {kind} must have the same entries, but {key!r} is {found[0]} for {one} 0 and "
                    f"{found[1]} for {one} {index}: create environments with the same specs, or collect separate "
                    "batches: MultiAsyncCollector, or sync=False."
                )
    join = torch.stack if dim is None else lambda values: torch.cat(values, dim)
    return {key: join([part[key] for part in parts]) for key in parts[0]}


def _current(state: dict[str, Any]) -> dict[str, Any]:
    """Convert a state of recurl 0.2, in which each kind of collector had its own format."""
    state = {"version": 0, "sent": False, **state}
    if "actors" in state:
        parts = [
            [{"order": part["order"], "version": part["version"], "entries": part["arrays"]} for part in queue]
            for queue in state["parts"]
        ]
        return {**state, "workers": state["actors"], "parts": parts}
    if "batch" in state:
        worker = state.get("worker", {"collector": state.get("collector")})
        batches = [] if state["batch"] is None else [dict(TensorDict(state["batch"], []).items(True, True))]
        frames = worker["collector"]["frames"] - sum(cast(Any, entries)[TRAJ_IDS].numel() for entries in batches)
        parts = [[{"order": 0, "version": 0, "entries": entries} for entries in batches]]
        return {"frames": frames, **state, "workers": [worker], "parts": parts}
    return {"parts": [[] for _ in state["workers"]], **state}
