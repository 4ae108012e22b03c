"""Collection in a thread while the calling thread learns, on the same GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from recurl.collectors.collector import Collector
from recurl.collectors.exploring import check_thread_explores_alone
from recurl.devices import numbered
from recurl.envs import EnvBase
from recurl.spans import WAITING, span

__all__ = ["ThreadedCollector"]

_T = TypeVar("_T")


class ThreadedCollector:
    """Collects batches ``[*B, T]`` in a thread, each while the calling thread learns from the previous one.

    As with :class:`OverlappedCollector` a batch begins when the previous one is fetched, with a copy of the policy's
    weights at that time: the first batch is on-policy, every later one is exactly one update old. Where the policy is
    on a GPU, it acts on a stream of its own, ahead of the learner's kernels, and a batch stays on the GPU.

    It is for environments that step in worker processes, so that the thread needs little of Python's lock; in this
    process two threads would take turns at it. Random numbers come from the default generator of the policy's device:
    the same seed gives the same batches as long as nothing else draws from it before :meth:`wait`.

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
        check_thread_explores_alone()
        place = numbered(device)
        self._stream = torch.cuda.Stream(place, priority=-1) if place is not None and place.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "recurl-collector")
        self._running: Future[TensorDict] | None = None
        self._fetched: TensorDict | None = None
        self._source, self._policy = policy, copy.deepcopy(policy)
        self._collector = self._idle(
            lambda: Collector(
                create_env_fn,
                self._policy,
                frames_per_batch=frames_per_batch,
                device=device,
                sequence_length=sequence_length,
            )
        )

    def collect(self) -> TensorDict:
        """Return the current batch, and begin the next one."""
        with span(WAITING):
            batch = self.wait()
        self._fetched = None
        self._start()
        return batch

    def wait(self) -> TensorDict:
        """Wait for the current batch, which :meth:`collect` will return; nothing is collected then."""
        if self._fetched is None:
            if self._running is None:
                self._start()
            assert self._running is not None
            running, self._running = self._running, None
            self._fetched = self._taken_over(running.result())
        return self._fetched

    def _start(self) -> None:
        self._policy.load_state_dict(self._source.state_dict())
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._running = self._thread.submit(self._collect)

    def _collect(self) -> TensorDict:
        with self._on_stream():
            return self._collector.collect()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _taken_over(self, batch: TensorDict) -> TensorDict:
        """Return a batch for the caller's stream."""
        if self._stream is not None:
            own = torch.cuda.current_stream(self._stream.device)
            own.wait_stream(self._stream)
            for tensor in batch.values(True, True):
                if isinstance(tensor, Tensor) and tensor.is_cuda:
                    tensor.record_stream(own)
        return batch

    def _idle(self, function: Callable[[], _T]) -> _T:
        """Return the result of ``function``, called here on the thread's stream once a batch under way is complete."""
        if self._running is not None:
            self.wait()
        if self._stream is None:
            return function()
        own = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(own)
        with self._on_stream():
            result = function()
        own.wait_stream(self._stream)
        return result

    def reset_rows(self, rows: Tensor) -> None:
        """Begin new episodes in some rows after the current batch; see :meth:`Collector.reset_rows`."""
        self._idle(lambda: self._collector.reset_rows(rows))

    def set_seed(self, seed: int) -> None:
        """Seed the environment; takes effect at its next full reset."""
        self._idle(lambda: self._collector.set_seed(seed))

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state for exact continuation; waits for the current batch, which is included."""
        state = self._idle(lambda: self._collector.state_dict())
        return {"batch": None if self._fetched is None else self._fetched.to_dict(), "collector": state}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a :meth:`state_dict`.

        Returns:
            Whether the environment's state was restored; see :meth:`Collector.load_state_dict`.
        """
        restored = self._idle(lambda: self._collector.load_state_dict(state["collector"]))
        batch, collector = state["batch"], self._collector
        self._fetched = None
        if batch is not None:
            shape = [*collector.env.batch_size, collector.steps_per_batch]
            self._fetched = TensorDict.from_dict(batch, batch_size=shape, device=collector.env.device)
            self._fetched.refine_names(..., "time")
        return restored

    def shutdown(self) -> None:
        """Wait for the current batch and close the environment; shutting down twice is harmless."""
        self._thread.shutdown(wait=True)
        self._collector.shutdown()
