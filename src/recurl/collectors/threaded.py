"""Collection in a thread that overlaps with learning on the same GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from recurl.collectors.asynchronous import AsynchronousCollector, Event, Transport
from recurl.collectors.exploring import check_thread_explores_alone
from recurl.collectors.weights import state_of
from recurl.collectors.worker import WorkerCollector
from recurl.core.devices import numbered
from recurl.envs import EnvBase

__all__ = ["ThreadedCollector"]


class _Thread(Transport):
    """One worker in this process: a thread collects, and the calling thread handles all other requests.

    Args:
        create_env_fn: an environment, or a function that creates one.
        policy: the policy; the worker has a copy.
        options: further arguments of the collector.
    """

    def __init__(
        self, create_env_fn: EnvBase | Callable[[], EnvBase], policy: nn.Module, options: dict[str, Any]
    ) -> None:
        check_thread_explores_alone()
        place = numbered(options["device"])
        self._stream = torch.cuda.Stream(place, priority=-1) if place is not None and place.type == "cuda" else None
        self._policy = copy.deepcopy(policy)
        with self._on_stream():
            self.collector = WorkerCollector(create_env_fn, self._policy, **options)
        self._join_stream()
        self.infos = [self.collector.info]
        self._thread = ThreadPoolExecutor(1, "recurl-collector")
        self._request: tuple[str, Future[Any]] | None = None

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which work follows that of the caller's stream."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def _join_stream(self) -> None:
        """Let work of the caller's stream follow that of the thread's."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def is_idle(self, index: int) -> bool:
        """Return whether the worker can take a request."""
        return self._request is None

    def ask(self, index: int, name: str, *arguments: Any) -> None:
        """Begin a batch in the thread, or handle another request."""
        if name == "collect":
            self._request = name, self._thread.submit(self._collect, self._on_stream())
            return
        self._request = name, Future()
        with self._on_stream():
            self._request[1].set_result(self._answer(name, *arguments))

    def _collect(self, on_stream: AbstractContextManager[Any]) -> Any:
        with on_stream:
            return self.collector.entries()

    def _answer(self, name: str, argument: Any = None, _: int = 0) -> Any:
        """Return the answer to a request; random numbers and trajectory ids are those of this process."""
        if name == "save":
            return {"collector": self.collector.state_dict()}
        if name == "load":
            return self.collector.load_state_dict(argument["collector"])
        return self.collector.set_seed(argument) if name == "seed" else self.collector.reset_rows(argument)

    def next_event(self) -> Event:
        """Wait for the thread; tensors on the GPU are then safe to use on the caller's stream."""
        assert self._request is not None
        name, future = self._request
        try:
            value = future.result()
        finally:
            if future.done():
                self._request = None
        self._join_stream()
        if name != "collect":
            return Event(0, "answer", value)
        for tensor in value.values():
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return Event(0, "batch", value)

    def publish(self, weights: Any) -> None:
        """Load the weights into the worker's policy, which is idle."""
        self._policy.load_state_dict(state_of(weights))

    def own_seed(self, seed: int, index: int) -> int:
        """Return the collector's seed, as the worker has no generators."""
        return seed

    def close(self) -> None:
        """Wait for the current batch and close the environment."""
        self._thread.shutdown(wait=True)
        self.collector.shutdown()


class ThreadedCollector(AsynchronousCollector):
    """Collects each batch ``[*B, T]`` in a thread while the calling thread learns from the previous one.

    As with :class:`OverlappedCollector` a batch begins when the previous one is fetched, with a copy of the policy's
    weights at that time: the first batch is on-policy, and every later one is exactly one update old. If the policy is
    on a GPU, it acts on a separate stream with higher priority than the learner's kernels, and batches stay on the GPU.

    It is intended for environments that step in worker processes, so that the thread rarely holds the GIL; environments
    in this process would compete for it. Random numbers come from the default generator of the policy's device: the
    same seed gives the same batches as long as nothing else draws from it before :meth:`wait`.

    Args:
        create_env_fn: an environment, or a function that creates one; see :class:`Collector`.
        policy: a module that maps a root to one with ``"action"``.
        frames_per_batch: number of steps per batch, summed over rows.
        device: device of the policy.
        sequence_length: see :class:`Collector`.

    Raises:
        UnsupportedError: tensordict has one exploration type for all threads.

    Example:
        >>> from recurl.envs import GymEnv
        >>> from recurl.modules import QValueActor
        >>> policy = QValueActor(nn.Linear(4, 2), in_keys=["observation"], action_space="categorical")
        >>> collector = ThreadedCollector(GymEnv("CartPole-v1", num_envs=2), policy, frames_per_batch=20)
        >>> [collector.collect().shape for _ in range(2)]
        [torch.Size([2, 10]), torch.Size([2, 10])]
        >>> collector.shutdown()
    """

    def __init__(
        self,
        create_env_fn: EnvBase | Callable[[], EnvBase],
        policy: nn.Module,
        *,
        frames_per_batch: int,
        device: torch.device | str | None = None,
        sequence_length: int | None = None,
    ) -> None:
        def connect(options: dict[str, Any]) -> _Thread:
            return _Thread(create_env_fn, policy, {**options, "device": device, "sequence_length": sequence_length})

        super().__init__(
            connect,
            policy,
            1,
            "threads",
            sync=True,
            max_lag=1,
            follows=True,
            frames_per_batch=frames_per_batch,
        )
        self.storing_device = cast(_Thread, self._transport).collector.storing_device
