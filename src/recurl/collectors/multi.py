"""Collection in several worker processes."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from recurl.collectors.asynchronous import AsynchronousCollector, Event, Transport
from recurl.collectors.weights import SharedWeights
from recurl.collectors.worker import serve_collector
from recurl.core.errors import ArgumentTypeError, WorkerError
from recurl.core.seeding import derive_seed
from recurl.envs import EnvBase
from recurl.envs.rollout import Policy
from recurl.envs.workers import Reply, WorkerGroup, WorkerTask
from recurl.envs.workers_env import creators
from recurl.envs.workers_memory import SharedTensors
from recurl.sequences.trajectories import TRAJECTORY_IDS

__all__ = ["MultiAsyncCollector", "MultiCollector", "MultiSyncCollector", "Processes"]


class Processes(Transport):
    """Worker processes, with weights and batches in shared memory. All are stopped when a call raises.

    Args:
        functions: creates the environment, for each worker.
        policy: the policy, sent by cloudpickle.
        options: further arguments of the workers' collectors.
        timeout: seconds that a step may take; None for no limit.
        restart: replace a worker that fails while it collects, unless it fails twice in a row.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[], Any]],
        policy: Policy | None,
        options: dict[str, Any],
        *,
        timeout: float | None,
        restart: bool,
    ) -> None:
        self.reuses_memory = True
        self._weights = SharedWeights.of(policy) if isinstance(policy, nn.Module) else None
        self.group = WorkerGroup([WorkerTask(serve_collector, (make, policy, options)) for make in functions], timeout)
        self.infos = self.group.greetings
        self._restart = restart
        self._asked: dict[int, str] = {}  # requests without an answer, by worker
        self._memory: dict[int, SharedTensors] = {}
        self._fragile: set[int] = set()  # replaced workers that haven't delivered a batch yet
        for index in range(len(functions)):
            self._begin(index)

    def _begin(self, index: int) -> None:
        """Send a newly started worker its block of trajectory ids and the weights."""
        entries = None if self._weights is None else self._weights.memory.entries
        self.group.ask(index, pickle.dumps((TRAJECTORY_IDS.reserve(), entries)))
        if self._weights is not None:
            self.group.send_memory(index, self._weights.memory)

    def is_idle(self, index: int) -> bool:
        """Return whether a worker can take a request."""
        return index not in self._asked

    def ask(self, index: int, name: str, *arguments: Any) -> None:
        """Send a request to an idle worker."""
        # Saving may create environments to test the saved state.
        self.group.ask(index, pickle.dumps((name, *arguments)), makes_envs=name == "save")
        self._asked[index] = name

    def next_event(self) -> Event:
        """Wait for the next event of a worker."""
        try:
            while True:
                event = self._event(self.group.next_reply(self._asked))
                if event is not None:
                    return event
        except BaseException:  # including interrupts: outstanding replies would be mistaken for later ones
            self.group.kill()
            raise

    def _event(self, reply: Reply) -> Event | None:
        index, request = reply.worker, self._asked.get(reply.worker)
        if reply.error is not None:
            if not self._restart or index in self._fragile or request not in (None, "collect"):
                raise reply.error
            text = f"A worker failed and is replaced; the steps of its current batch are lost.\n{reply.error}"
            warnings.warn(f"{text}{reply.error.__cause__ or ''}", stacklevel=2)
            self.group.restart(index)
            self._asked[index] = "start"
            self._fragile.add(index)
            return Event(index, "lost")
        if request == "collect" and reply.value is not None:  # the entries of new shared memory
            memory = self.group.receive_memory(index, reply.value)
            if memory is not None:
                self._memory[index] = memory
            return None
        del self._asked[index]
        if request == "start":
            self._begin(index)
            return Event(index, "ready")
        if request != "collect":
            return Event(index, "answer", reply.value)
        self._fragile.discard(index)
        return Event(index, "batch", self._memory[index].tensors)

    def publish(self, weights: Any) -> None:
        """Write the weights to the shared memory, from which workers read when they begin a batch."""
        assert self._weights is not None
        try:
            self._weights.write(weights, self.group.timeout)
        except WorkerError:
            self.group.kill()
            raise

    def own_seed(self, seed: int, index: int) -> int:
        """Return the seed of the global generators of a worker."""
        return derive_seed(seed, "collector", index)

    def check_open(self) -> None:
        """Check that the workers are running and belong to this process."""
        self.group.check_open()

    def close(self) -> None:
        """Stop the workers and release all resources."""
        self.group.close()
        self._memory.clear()
        if self._weights is not None:
            self._weights.memory.close()


class MultiCollector(AsynchronousCollector):
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
        restart_workers: bool = False,
        timeout: float | None = 9.0,
        **arguments: Any,
    ) -> None:
        if not isinstance(create_env_fn, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance] - users
            raise ArgumentTypeError(
                f"create_env_fn must be a list with one function per worker, got {create_env_fn!r}."
            )
        functions = creators(len(create_env_fn), create_env_fn)
        self.num_workers = len(functions)

        def connect(options: dict[str, Any]) -> Processes:
            return Processes(functions, policy, options, timeout=timeout, restart=restart_workers)

        super().__init__(connect, policy, len(functions), "workers", **arguments)

    def _remains_after(self, batches: int) -> bool:
        return True  # a batch begun ahead belongs to the state, and a resumed run may have more frames


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
        super().__init__(create_env_fn, policy, sync=True, max_lag=0, cat_results=cat_results, **arguments)


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

    def __init__(
        self, create_env_fn: Sequence[Callable[[], EnvBase]], policy: Policy | None = None, **arguments: Any
    ) -> None:
        super().__init__(create_env_fn, policy, sync=False, max_lag=None, **arguments)
