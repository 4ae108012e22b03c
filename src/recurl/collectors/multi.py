"""Collection in several worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recurl.collectors.asynchronous import AsynchronousCollector
from recurl.collectors.processes import Processes
from recurl.core.errors import ArgumentTypeError
from recurl.envs import EnvBase
from recurl.envs.rollout import Policy
from recurl.envs.workers_env import creators

__all__ = ["MultiAsyncCollector", "MultiCollector", "MultiSyncCollector"]


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
