"""Collection in several worker processes."""

from __future__ import annotations

import pickle
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from recurl.collectors.background import CollectorBase, Extendable, units_of
from recurl.collectors.parts import check_cat_results, dimension, load_requests
from recurl.collectors.weights import SharedWeights, Weights
from recurl.collectors.worker import CollectorInfo, serve_collector
from recurl.core.errors import ArgumentError, ArgumentTypeError, UsageError, WorkerError
from recurl.core.keys import NestedKey
from recurl.core.ranges import checked_seed
from recurl.core.seeding import derive_seed
from recurl.envs import EnvBase
from recurl.envs.rollout import Policy
from recurl.envs.workers import Reply, WorkerGroup, WorkerTask
from recurl.envs.workers_env import creators
from recurl.envs.workers_memory import SharedTensors
from recurl.sequences.mode import ExplorationType
from recurl.sequences.trajectories import TRAJECTORY_IDS

__all__ = [
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "WorkerOptions",
    "check_options",
    "common_info",
]

_COLLECT = pickle.dumps(("collect",))


class WorkerOptions(TypedDict, total=False):
    """Arguments passed to the :class:`~recurl.collectors.Collector` of each worker."""

    reset_at_each_iter: bool
    set_truncated: bool
    max_frames_per_traj: int | None
    auto_register_policy_transforms: bool
    device: torch.device | str | None
    exploration_type: ExplorationType


def check_options(options: Mapping[str, object], init_random_frames: int) -> None:
    """Check arguments that are passed to the workers' collectors.

    Raises:
        ArgumentError: ``init_random_frames`` is negative.
        ArgumentTypeError: an argument is not among :class:`WorkerOptions`.
    """
    unknown = sorted(options.keys() - WorkerOptions.__annotations__.keys())
    if unknown:
        known = sorted(WorkerOptions.__annotations__)
        raise ArgumentTypeError(f"Unknown arguments {unknown}: further arguments must be among {known}.")
    if init_random_frames < 0:
        raise ArgumentError(f"init_random_frames must not be negative, got {init_random_frames}.")


def common_info(infos: Sequence[CollectorInfo]) -> CollectorInfo:
    """Return the properties that the workers' collectors share.

    Raises:
        ArgumentError: the batch sizes of their environments differ.
    """
    for index, info in enumerate(infos):
        if info != infos[0]:
            raise ArgumentError(
                f"The environments of all workers must have the same batch size: that of worker {index} is "
                f"{list(info.rows)}, that of worker 0 is {list(infos[0].rows)}."
            )
    return infos[0]


class MultiCollector(CollectorBase):
    """Base class of collectors with worker processes.

    Each worker has its own environment, policy and recurrent states, and runs a :class:`~recurl.collectors.Collector`.
    If a worker raises, dies or hangs, the call raises with the worker's traceback as its cause, and all workers are
    stopped (unless ``restart_workers``). They also exit when this object is closed or garbage-collected, and when this
    process dies. The main script needs no ``if __name__ == "__main__"`` guard, and environments registered there with
    ``gymnasium.register`` are also registered in the workers. Requires a POSIX system: Linux, macOS.

    Args:
        create_env_fn: one function per worker, each of which creates an environment of the same batch size ``[*B]``.
        policy: maps a root to one with ``"action"``; random actions when None. Sent to the workers by cloudpickle.
        frames_per_batch: number of frames in a batch, rounded up (with a warning) to whole steps.
        total_frames: number of frames after which collection stops, rounded up (with a warning) to whole batches; -1
            for no limit.
        restart_workers: replace a worker that failed, with a warning, instead of raising. The steps of its current
            batch are lost, and its new environment is not seeded. If it fails again before its next batch, the error is
            raised.
        timeout: seconds that a policy call together with its step and reset may take before the worker counts as hung;
            None for no limit.
        init_random_frames: number of initial frames with random actions, summed over workers.
        postproc: function applied to every batch, in this process; its result is yielded.
        replay_buffer: object whose ``extend(batch)`` receives the batches; see ``Collector``.
        storing_device: device of the batches.
        **options: ``reset_at_each_iter``, ``set_truncated``, ``max_frames_per_traj``,
            ``auto_register_policy_transforms``, ``device`` and ``exploration_type``; see ``Collector``.

    Raises:
        ArgumentError: a number is out of range, or the batch sizes of the workers differ.
        ArgumentTypeError: an argument is unknown, not callable or can't be pickled, or a function does not create an
            environment.
        UnsupportedError: the system is not POSIX.
        WorkerError: a worker failed to start.
        RecurlError: the ``Collector`` in a worker raised this error.
    """

    def __init__(
        self,
        create_env_fn: Sequence[Callable[[], EnvBase]],
        policy: Policy | None = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        restart_workers: bool = False,
        timeout: float | None = 9.0,
        init_random_frames: int = 0,
        postproc: Callable[[TensorDict], Any] | None = None,
        replay_buffer: Extendable | None = None,
        storing_device: torch.device | str = "cpu",
        **options: Unpack[WorkerOptions],
    ) -> None:
        check_options(options, init_random_frames)
        if not isinstance(create_env_fn, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance] - users
            raise ArgumentTypeError(
                f"create_env_fn must be a list with one function per worker, got {create_env_fn!r}."
            )
        functions = creators(len(create_env_fn), create_env_fn)
        self.num_workers = len(functions)
        workers = self._workers_per_batch()
        frames_each = units_of("frames_per_batch", frames_per_batch, workers, f"{workers} workers")
        given = {
            **options,
            "frames_per_batch": frames_each,
            "init_random_frames": -(-init_random_frames // self.num_workers),
        }
        self._policy = policy
        self._weights = SharedWeights.of(policy) if isinstance(policy, nn.Module) else None
        self._group = WorkerGroup(
            [WorkerTask(serve_collector, (create, policy, given)) for create in functions], timeout
        )
        try:
            info = common_info(self._group.greetings)
            self._rows, self.steps_per_batch = info.rows, info.steps
            actual = info.steps * info.rows.numel() * workers
            if frames_each * workers != actual:
                units_of("frames_per_batch", frames_per_batch, actual, f"{workers} x {info.rows.numel()} rows")
            super().__init__(actual, total_frames, postproc, replay_buffer)
        except BaseException:
            self._group.close()
            raise
        self.storing_device = torch.device(storing_device)
        self._restart = restart_workers
        self._memory: dict[int, SharedTensors] = {}
        self._collecting: set[int] = set()
        self._starting: set[int] = set()
        self._fragile: set[int] = set()
        for index in range(self.num_workers):
            self._begin(index)

    @abstractmethod
    def _workers_per_batch(self) -> int:
        """Return the number of workers that collect a batch together."""

    def _prepare_background(self) -> None:
        """Do nothing, as workers have their own policies."""

    def _begin(self, index: int) -> None:
        """Send a newly started worker its block of trajectory ids and the weights."""
        entries = None if self._weights is None else self._weights.memory.entries
        self._group.ask(index, pickle.dumps(("begin", TRAJECTORY_IDS.reserve(), entries)))
        if self._weights is not None:
            self._group.send_memory(index, self._weights.memory)

    def _ask(self, indices: Collection[int]) -> None:
        for index in indices:
            self._group.ask(index, _COLLECT)
            self._collecting.add(index)

    def _next_batch(self) -> int:
        """Wait for any collecting worker to write a batch to its memory, and return its index."""
        try:
            while True:
                reply = self._group.next_reply(self._collecting)
                index = reply.worker
                if reply.error is not None:
                    self._failed(reply)
                elif index in self._starting:
                    self._starting.discard(index)
                    self._begin(index)
                    self._ask([index])
                elif reply.value is not None:
                    memory = self._group.receive_memory(index, reply.value)
                    if memory is not None:
                        self._memory[index] = memory
                else:
                    self._collecting.discard(index)
                    self._fragile.discard(index)
                    return index
        except BaseException:  # including interrupts: outstanding batches would be mistaken for later ones
            self._group.kill()
            raise

    def _failed(self, reply: Reply) -> None:
        assert reply.error is not None
        if not self._restart or reply.worker in self._fragile:
            raise reply.error
        text = f"A worker failed and is replaced; the steps of its current batch are lost.\n{reply.error}"
        warnings.warn(f"{text}{reply.error.__cause__ or ''}", stacklevel=2)
        self._group.restart(reply.worker)
        self._starting.add(reply.worker)
        self._fragile.add(reply.worker)

    def update_policy_weights_(self, weights: Weights | None = None) -> None:
        """Send weights to the workers, which use them starting with their next batch.

        Args:
            weights: module, state dict, or TensorDict of parameters; when None, the policy passed to the constructor.

        Raises:
            UsageError: the policy is not a module, so it has no weights; or the collector was shut down.
            ArgumentError: names or shapes differ from the policy's.
            WorkerError: a worker hangs while it reads the previous weights.
        """
        self._raise_background_error()
        self._check_open()
        if self._weights is None:
            raise UsageError(f"Only an nn.Module has weights to update, got a policy {type(self._policy).__name__}.")
        self._write_weights(self._policy if weights is None else weights)  # pyright: ignore[reportArgumentType] - a module, as there are weights

    def _write_weights(self, weights: Weights) -> None:
        assert self._weights is not None
        try:
            self._weights.write(weights, self._group.timeout)
        except WorkerError:
            self._group.kill()
            raise

    def set_seed(self, seed: int) -> None:
        """Seed environments, at their next full reset, and random actions, starting with the next batch.

        Row ``i`` of all workers gets ``seed + i``. The global generators of each worker, from which it draws actions,
        get seeds derived from ``seed`` (:func:`recurl.core.seeding.derive_seed`).
        """
        first = checked_seed(seed)
        self._between_batches(lambda: self._seed_workers(first))

    def _seed_workers(self, seed: int) -> None:
        for index in range(self.num_workers):
            own = derive_seed(seed, "collector", index)
            self._group.ask(index, pickle.dumps(("seed", seed + index * self._rows.numel(), own)))

    def _query_all(self, *request: Any) -> list[Any]:
        """Return the answers of all workers to the same request."""
        return self._query([request] * self.num_workers)

    def _query(self, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the answers of all workers to one request each."""
        for index, request in enumerate(requests):
            # Saving may create environments to test the saved state.
            self._group.ask(index, pickle.dumps(request), makes_envs=request[0] == "save")
        return self._group.answers(range(self.num_workers))

    def _check_open(self) -> None:
        super()._check_open()
        self._group.check_open()

    def _close(self) -> None:
        self._group.close()
        self._memory.clear()
        if self._weights is not None:
            self._weights.memory.close()

    def _tensordict(self, leaves: dict[NestedKey, Tensor], batch_size: Sequence[int]) -> TensorDict:
        batch = TensorDict(cast(Any, leaves), batch_size).to(self.storing_device)
        batch.refine_names(..., "time")
        self.frames += batch.numel()
        return batch


class MultiSyncCollector(MultiCollector):
    """Collects each batch with several workers together, all with the same weights.

    Args:
        create_env_fn: one function per worker, each of which creates an environment of the same batch size ``[*B]``.
        policy: maps a root to one with ``"action"``; random actions when None. Sent to the workers by cloudpickle.
        cat_results: ``"stack"`` (or None) yields ``[num_workers, *B, T]``; a number concatenates along that dimension
            of ``[*B, T]``. A batch has ``frames_per_batch`` frames in total.
        **arguments: further arguments of ``MultiCollector``, the base class.

    Raises:
        ArgumentError: ``cat_results`` is out of range.

    Example:
        >>> from recurl.envs import GymEnv
        >>> create = lambda: GymEnv("CartPole-v1", num_envs=2)
        >>> with MultiSyncCollector([create], frames_per_batch=20, total_frames=20, cat_results=0) as collector:
        ...     [batch.shape for batch in collector]
        [torch.Size([2, 10])]
    """

    def __init__(
        self,
        create_env_fn: Sequence[Callable[[], EnvBase]],
        policy: Policy | None = None,
        *,
        cat_results: str | int | None = None,
        **arguments: Any,
    ) -> None:
        check_cat_results(cat_results)
        super().__init__(create_env_fn, policy, **arguments)
        try:
            self._cat = dimension(cat_results, self._rows)
        except ArgumentError:
            self.shutdown()
            raise

    def _workers_per_batch(self) -> int:
        return self.num_workers

    def _collect(self) -> TensorDict:
        self._ask(range(self.num_workers))
        while self._collecting:
            self._next_batch()
        parts = [self._memory[index].tensors for index in range(self.num_workers)]
        shape = [*self._rows, self.steps_per_batch]
        if self._cat is None:
            return self._tensordict(
                {key: torch.stack([part[key] for part in parts]) for key in parts[0]}, [self.num_workers, *shape]
            )
        shape[self._cat] *= self.num_workers
        return self._tensordict({key: torch.cat([part[key] for part in parts], self._cat) for key in parts[0]}, shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state for exact continuation: that of every worker, with its random generator.

        It consists of tensors and plain Python values; see :meth:`Collector.state_dict`.
        """
        return self._between_batches(lambda: {"frames": self.frames, "workers": self._query_all("save")})

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a :meth:`state_dict`.

        Returns:
            Whether the states of all environments were restored; see :meth:`Collector.load_state_dict`.

        Raises:
            ArgumentError: the state was saved with another number of workers.
        """
        self._check_idle()
        requests = load_requests(state["workers"], self.num_workers, "workers")
        self.frames = state["frames"]
        return all(self._query(requests))


class MultiAsyncCollector(MultiCollector):
    """Collects with several workers, each of which produces its own batches ``[*B, T]`` at its own pace.

    A batch has ``frames_per_batch`` frames, all from one worker. A worker begins its next batch as soon as the previous
    one is fetched, so the acting weights may be one or more updates old.

    Args:
        create_env_fn: one function per worker, each of which creates an environment of the same batch size ``[*B]``.
        policy: maps a root to one with ``"action"``; random actions when None. Sent to the workers by cloudpickle.
        **arguments: further arguments of ``MultiCollector``, the base class.

    Example:
        >>> from recurl.envs import GymEnv
        >>> create = lambda: GymEnv("CartPole-v1")
        >>> with MultiAsyncCollector([create], frames_per_batch=10, total_frames=20) as collector:
        ...     [batch.shape for batch in collector]
        [torch.Size([10]), torch.Size([10])]
    """

    def _workers_per_batch(self) -> int:
        return 1

    def _collect(self) -> TensorDict:
        self._ask(set(range(self.num_workers)) - self._collecting)
        index = self._next_batch()
        leaves = {key: value.clone() for key, value in self._memory[index].tensors.items()}
        self._ask([index])
        return self._tensordict(leaves, [*self._rows, self.steps_per_batch])
