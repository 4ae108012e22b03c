"""Collection in Ray actors."""

from __future__ import annotations

import copy
import itertools
import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Unpack, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from recurl.collectors.actors.arrays import Array, joined, tensors_of
from recurl.collectors.actors.group import ActorGroup, Replacement
from recurl.collectors.actors.remote import SharedArguments
from recurl.collectors.actors.session import RaySession
from recurl.collectors.actors.supply import Part, Recipe, Supply
from recurl.collectors.background import CollectorBase, Extendable, units_of
from recurl.collectors.multi import WorkerOptions, check_options, common_info
from recurl.collectors.parts import check_cat_results, dimension, load_requests
from recurl.collectors.weights import Weights
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import WEIGHTS_LAG, WEIGHTS_VERSION, NestedKey
from recurl.core.ranges import checked_seed
from recurl.envs import EnvBase
from recurl.envs.pickling import pickled
from recurl.envs.registrations import registrations
from recurl.envs.rollout import Policy
from recurl.envs.workers_env import creators

__all__ = ["RayCollector"]


class RayCollector(CollectorBase):
    """Collects with Ray actors, each of which runs a :class:`~recurl.collectors.Collector` with its own environment.

    Weights are sent to the actors once per version, through Ray's object store; batches are returned as arrays, without
    pickling. Every batch also has, int64 ``[*B, T]``: ``("collector", "version")``, the version of the acting weights,
    and ``("collector", "lag")``, the number of newer versions. Only weights that an actor has received count as a
    version, so the newest version increases by at most one per batch. Trajectory ids are unique across all actors.

    An actor that dies, alone or with its node, is replaced, with a warning. Its unfinished batch is lost. Every
    delivered step was executed exactly once, in order, and the requested number of steps is delivered. The trajectories
    of the dead actor end without being done, and its successor begins new ones, so no trajectory spans both;
    :attr:`replacements` lists them. An actor that raises ends the collection with its traceback. All actors exit with
    this object and with this process.

    If the program has initialized Ray (``ray.init``), that instance is used. Otherwise, the collector connects to
    ``address``, or starts a Ray instance on this machine that listens only on the loopback interface and is shut down
    at the end.

    Args:
        create_env_fn: function that creates an environment, or a list of functions, one per actor; all environments
            must have the same batch size ``[*B]``.
        policy: maps a root to one with ``"action"``; random actions when None. Actors run it on the CPU.
        num_collectors: number of actors; the number of functions when None.
        frames_per_batch: number of frames in a batch, rounded up (with a warning) to whole steps.
        total_frames: number of frames after which collection stops, rounded up (with a warning) to whole batches; -1
            for no limit.
        sync: collect each batch with all actors together, like :class:`~recurl.collectors.MultiSyncCollector`;
            otherwise each batch comes from one actor, as soon as it is ready, as in
            :class:`~recurl.collectors.MultiAsyncCollector`.
        max_lag: maximum number of versions by which the weights of a batch may be older than the newest. With ``sync``,
            an actor may be this many batches ahead, so that it acts while this process learns; 0, the default with
            ``sync``, gives batches from the newest weights. Otherwise, at least the number of actors, or None for no
            limit: the collector waits for a batch that would become too old.
        cat_results: with ``sync``: ``"stack"`` (or None) yields ``[num_collectors, *B, T]``; a number concatenates
            along that dimension of ``[*B, T]``.
        epsilons: probability of random actions for each actor, replacing that of the policy's
            :class:`~recurl.modules.EGreedyModule`; None for the policy's own.
        address: ``HOST:PORT`` of a Ray cluster, or ``"auto"``, if the program has not initialized Ray.
        num_cpus: CPUs that Ray reserves for each actor; by default 1, or 0 in a Ray instance started here.
        max_restarts: maximum number of successive replacements of an actor without a delivered batch.
        timeout: maximum seconds per batch before an actor counts as hung and is replaced; None for no limit.
        init_random_frames: number of initial frames with random actions, summed over actors.
        postproc: function applied to every batch, in this process; its result is yielded.
        replay_buffer: object whose ``extend(batch)`` receives the batches; see ``Collector``.
        storing_device: device of the batches.
        **options: ``reset_at_each_iter``, ``set_truncated``, ``max_frames_per_traj``,
            ``auto_register_policy_transforms``, ``device`` and ``exploration_type``; see ``Collector``.

    Attributes:
        discarded_frames: upper bound on the frames of batches ready or in progress when the collector was shut down.

    Raises:
        ArgumentError: a number is out of range, the batch sizes of the actors differ, ``address`` does not answer, or
            too few CPUs of the cluster are free.
        ArgumentTypeError: an argument is unknown, not callable, or can't be pickled; the message names the part.
        MissingDependencyError: Ray is not installed.
        UsageError: an actor has another version of recurl or torch.
        WorkerError: an actor did not start, or died too often.
        RecurlError: the ``Collector`` in an actor raised this error.
    """

    def __init__(  # noqa: PLR0913 - the customary arguments
        self,
        create_env_fn: Callable[[], EnvBase] | Sequence[Callable[[], EnvBase]],
        policy: Policy | None = None,
        *,
        num_collectors: int | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        sync: bool = True,
        max_lag: int | None = None,
        cat_results: str | int | None = None,
        epsilons: Sequence[float] | None = None,
        address: str | None = None,
        num_cpus: float | None = None,
        max_restarts: int = 3,
        timeout: float | None = None,
        init_random_frames: int = 0,
        postproc: Callable[[TensorDict], Any] | None = None,
        replay_buffer: Extendable | None = None,
        storing_device: torch.device | str = "cpu",
        **options: Unpack[WorkerOptions],
    ) -> None:
        check_options(options, init_random_frames)
        check_cat_results(cat_results)
        functions = _functions(create_env_fn, num_collectors)
        count = self.num_collectors = len(functions)
        self.max_lag = _checked_lag(max_lag, count, sync=sync)
        _check_numbers(count, epsilons, max_restarts, timeout, num_cpus)
        self.sync = sync
        parts = count if sync else 1
        frames_each = units_of("frames_per_batch", frames_per_batch, parts, f"{parts} actors")
        given = {**options, "frames_per_batch": frames_each, "init_random_frames": -(-init_random_frames // count)}
        self._recipe = Recipe(functions, epsilons)
        shared = pickled("options", SharedArguments(registrations(), pickled("policy", _on_cpu(policy)), given))
        session = RaySession(address)
        try:
            needed = (0.0 if session.is_private else 1.0) if num_cpus is None else num_cpus
            session.check_free(count, needed)
            limits = {"num_cpus": needed, "max_restarts": max_restarts, "timeout": timeout}
            self._supply = Supply(session, self._recipe, shared, policy, count, **limits)
        except BaseException:
            session.close()
            raise
        self._finalizer = weakref.finalize(self, _terminate, session, self._supply.group, os.getpid())
        try:
            self._rows, self.steps_per_batch = common_info(self._supply.infos)
            self._supply.frames = self._recipe.rows = self._rows.numel()
            self._supply.frames *= self.steps_per_batch
            actual = self._supply.frames * parts
            if frames_each * parts != actual:
                units_of("frames_per_batch", frames_per_batch, actual, f"{parts} x {self._rows.numel()} rows")
            super().__init__(actual, total_frames, postproc, replay_buffer)
            self._cat = dimension(cat_results, self._rows) if sync else 0
        except BaseException:
            self._close()
            raise
        self.discarded_frames = 0
        self.storing_device = torch.device(storing_device)

    @property
    def version(self) -> int:
        """Version of the newest weights."""
        return self._supply.version

    @property
    def processes(self) -> list[int]:
        """Process ids of the actors, each on the actor's machine; 0 for an actor that is starting."""
        return [actor.process for actor in self._supply.group.actors]

    @property
    def replacements(self) -> list[Replacement]:
        """The actors that died, in order."""
        return self._supply.replacements

    @property
    def lost_frames(self) -> int:
        """Upper bound on the frames executed but not delivered because their actors died."""
        return sum(replacement.lost_frames for replacement in self.replacements)

    def _collect(self) -> TensorDict:
        parts = self._next_of_all() if self.sync else [self._next()]
        self.frames += self.frames_per_batch
        if not self.sync:
            self._request_from_idle()
        elif self.max_lag:
            self._request_from_all(self.max_lag - 1)
        return self._tensordict([{**part.arrays, **self._version_entries(part)} for part in parts])

    def _remains_after(self, batches: int) -> bool:
        return self.total_frames == -1 or self.frames + batches * self.frames_per_batch < self.total_frames

    def _next_of_all(self) -> list[Part]:
        """Wait for the next part of every actor."""
        queues = self._supply.parts
        while not all(queues):
            self._request_from_all(cast(int, self.max_lag), wanted=1)
            self._supply.wait()
        return [queue.popleft() for queue in queues]

    def _request_from_all(self, ahead: int, *, wanted: int = 0) -> None:
        """Request a part from each idle actor with at most ``ahead`` parts waiting; always up to ``wanted`` parts."""
        for index, queue in enumerate(self._supply.parts):
            waiting = len(queue)
            if waiting <= ahead and (waiting < wanted or self._remains_after(waiting)):
                self._supply.request_if_idle(index)

    def _next(self) -> Part:
        """Wait for the part requested first, or a later one that may overtake it."""
        supply = self._supply
        while True:
            self._request_from_idle(wanted=1)
            for _, index in sorted((queue[0].order, index) for index, queue in enumerate(supply.parts) if queue):
                if self._may_overtake(index):
                    return supply.parts[index].popleft()
            supply.wait()

    def _request_from_idle(self, *, wanted: int = 0) -> None:
        """Request parts from the idle actors without waiting parts; always up to ``wanted`` parts in total."""
        supply = self._supply
        for index, queue in enumerate(supply.parts):
            out = supply.outstanding
            if not queue and (out < wanted or self._remains_after(out)):
                supply.request_if_idle(index)

    def _may_overtake(self, index: int) -> bool:
        """Return whether delivering an actor's part now would not make any other part too old."""
        if self.max_lag is None:
            return True
        supply, own = self._supply, self._supply.parts[index][0]
        waiting = [(queue[0].order, queue[0].version) for queue in supply.parts if queue]
        others = sorted(part for part in (*waiting, *supply.in_progress.values()) if part[0] != own.order)
        if not others or own.order < others[0][0]:
            return True
        return all(version + self.max_lag >= self.version + after for after, (_, version) in enumerate(others, 1))

    def _version_entries(self, part: Part) -> dict[NestedKey, Array]:
        """Return the weights version and the lag of a part, at every step."""
        shape = [*self._rows, self.steps_per_batch]
        numbers = {WEIGHTS_VERSION: part.version, WEIGHTS_LAG: self.version - part.version}
        return {key: Array(np.full(shape, number, dtype=np.int64), "int64") for key, number in numbers.items()}

    def _tensordict(self, parts: Sequence[dict[NestedKey, Array]]) -> TensorDict:
        shape = [*self._rows, self.steps_per_batch]
        batch = TensorDict(cast(Any, joined(parts, self._cat)), _joined_shape(shape, len(parts), self._cat))
        batch = batch.to(self.storing_device)
        batch.refine_names(..., "time")
        return batch

    def update_policy_weights_(self, weights: Weights | None = None) -> None:
        """Send weights to the actors, which use them for the batches that they begin after this call.

        Args:
            weights: module, state dict, or TensorDict of parameters; when None, the policy passed to the constructor.

        Raises:
            UsageError: the policy is not a module, so it has no weights; or the collector was shut down.
            ArgumentError: names or shapes differ from the policy's.
        """
        self._raise_background_error()
        self._check_open()
        self._supply.publish(weights)

    def set_seed(self, seed: int) -> None:
        """Seed environments, at their next full reset, and random actions, starting with the next batch.

        Row ``i`` of all actors gets ``seed + i``. The successors of actors get other seeds, also derived from ``seed``.
        """
        seeds = [("seed", *each) for each in self._recipe.seeds(checked_seed(seed))]
        self._between_batches(lambda: self._supply.query(seeds))

    def reset_rows(self, rows: Tensor) -> None:
        """Begin new episodes in some rows, after the batches in progress; see :meth:`Collector.reset_rows`.

        Args:
            rows: mask of the rows to reset, in the order of a batch.

        Raises:
            UnsupportedError: a batch does not have the rows of all actors.
        """
        self._check_idle()
        if not self.sync or (self._cat is not None and self._cat == len(self._rows)):
            raise UnsupportedError("Rows can be reset only if each batch has the rows of all actors: use sync=True.")
        parts = rows.unbind(0) if self._cat is None else rows.chunk(self.num_collectors, self._cat)
        self._supply.query([("reset_rows", Array.of(part.contiguous())) for part in parts])

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state: that of every actor, with its random generator, and undelivered batches.

        Waits for the batches in progress. The state consists of tensors and plain Python values; see
        :meth:`Collector.state_dict`.
        """
        return self._between_batches(self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        supply = self._supply
        saved = supply.query([("save",)] * self.num_collectors)
        parts = [[{**part._asdict(), "arrays": tensors_of(part.arrays)} for part in queue] for queue in supply.parts]
        replaced = self._recipe.replaced + len(self.replacements)
        versions = {"version": supply.version, "sent": supply.sent}
        return {"frames": self.frames, **versions, "replaced": replaced, "actors": saved, "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a :meth:`state_dict`.

        Returns:
            Whether the states of all environments were restored; see :meth:`Collector.load_state_dict`.

        Raises:
            ArgumentError: the state was saved with another number of actors.
        """
        self._check_idle()
        restored = self._supply.query(load_requests(state["actors"], self.num_collectors, "actors"))
        self.frames, self._recipe.replaced = state["frames"], state["replaced"]
        self._supply.restore(state["version"], state["parts"], sent=state["sent"])
        return all(restored)

    def _prepare_background(self) -> None:
        """Do nothing, as actors have their own policies."""

    def _close(self) -> None:
        if self._finalizer.detach() is not None:
            self.discarded_frames = self._supply.outstanding * self._supply.frames
            self._supply.close()


def _terminate(session: RaySession, group: ActorGroup, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork, which must not terminate the actors
        group.kill()
        session.close()


def _functions(create_env_fn: Any, count: int | None) -> list[Callable[[], Any]]:
    if count is None:
        if not isinstance(create_env_fn, Sequence):
            raise ArgumentError("Pass num_collectors, the number of actors, or a list with one function per actor.")
        count = len(create_env_fn)
    if count < 1:
        raise ArgumentError(f"num_collectors must be at least 1, got {count}.")
    return creators(count, create_env_fn)


def _checked_lag(max_lag: int | None, count: int, *, sync: bool) -> int | None:
    if sync:
        max_lag = max_lag or 0
        if max_lag < 0:
            raise ArgumentError(f"max_lag must not be negative, got {max_lag}.")
    elif max_lag is not None and max_lag < count:
        raise ArgumentError(
            f"max_lag must be at least the number of actors, {count}, if each collects separate batches, since the "
            f"batches of all other actors may be learned from before its own; got {max_lag}. Use sync=True."
        )
    return max_lag


def _check_numbers(
    count: int, epsilons: Sequence[float] | None, max_restarts: int, timeout: float | None, num_cpus: float | None
) -> None:
    if epsilons is not None and len(epsilons) != count:
        raise ArgumentError(f"There must be one epsilon for each of the {count} actors, got {len(epsilons)}.")
    if max_restarts < 0:
        raise ArgumentError(f"max_restarts must not be negative, got {max_restarts}.")
    if timeout is not None and not timeout > 0:  # also rejects NaN
        raise ArgumentError(f"timeout must be positive, or None for no limit, got {timeout}.")
    if num_cpus is not None and not 0 <= num_cpus < math.inf:
        raise ArgumentError(f"num_cpus must not be negative, got {num_cpus}.")


def _on_cpu(policy: Policy | None) -> Policy | None:
    if not isinstance(policy, nn.Module):
        return policy
    tensors = itertools.chain(policy.parameters(), policy.buffers())
    return policy if all(tensor.device.type == "cpu" for tensor in tensors) else copy.deepcopy(policy).cpu()


def _joined_shape(shape: list[int], count: int, dim: int | None) -> list[int]:
    if dim is None:
        return [count, *shape]
    return [size * count if place == dim else size for place, size in enumerate(shape)]
