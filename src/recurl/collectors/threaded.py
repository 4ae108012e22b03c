"""Collection in a thread that overlaps with learning on the same GPU."""

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
from recurl.core.devices import numbered
from recurl.core.spans import WAITING, span
from recurl.envs import EnvBase

__all__ = ["ThreadedCollector"]

_T = TypeVar("_T")


class ThreadedCollector:
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
        check_thread_explores_alone()
        place = numbered(device)
        self._stream = torch.cuda.Stream(place, priority=-1) if place is not None and place.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "recurl-collector")
        self._running: Future[TensorDict] | None = None
        self._fetched: TensorDict | None = None
        self._source, self._policy = policy, copy.deepcopy(policy)
        self._collector = self._call_when_idle(
            lambda: Collector(
                create_env_fn,
                self._policy,
                frames_per_batch=frames_per_batch,
                device=device,
                sequence_length=sequence_length,
            )
        )

    def collect(self) -> TensorDict:
        """Return the current batch and begin the next one."""
        with span(WAITING):
            batch = self.wait()
        self._fetched = None
        self._start()
        return batch

    def wait(self) -> TensorDict:
        """Wait for the current batch, which :meth:`collect` will return; the thread is then idle."""
        if self._fetched is None:
            if self._running is None:
                self._start()
            assert self._running is not None
            running, self._running = self._running, None
            self._fetched = self._on_callers_stream(running.result())
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

    def _on_callers_stream(self, batch: TensorDict) -> TensorDict:
        """Return a batch that is safe to use on the caller's stream."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for tensor in batch.values(True, True):
                if isinstance(tensor, Tensor) and tensor.is_cuda:
                    tensor.record_stream(current)
        return batch

    def _call_when_idle(self, function: Callable[[], _T]) -> _T:
        """Call ``function`` on the thread's stream, after any batch in progress, and return its result."""
        if self._running is not None:
            self.wait()
        if self._stream is None:
            return function()
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with self._on_stream():
            result = function()
        current.wait_stream(self._stream)
        return result

    def reset_rows(self, rows: Tensor) -> None:
        """Begin new episodes in some rows after the current batch; see :meth:`Collector.reset_rows`."""
        self._call_when_idle(lambda: self._collector.reset_rows(rows))

    def set_seed(self, seed: int) -> None:
        """Seed the environment; takes effect at its next full reset."""
        self._call_when_idle(lambda: self._collector.set_seed(seed))

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state for exact continuation; waits for the current batch, which is included."""
        state = self._call_when_idle(lambda: self._collector.state_dict())
        return {"batch": None if self._fetched is None else self._fetched.to_dict(), "collector": state}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a :meth:`state_dict`.

        Returns:
            Whether the environment's state was restored; see :meth:`Collector.load_state_dict`.
        """
        restored = self._call_when_idle(lambda: self._collector.load_state_dict(state["collector"]))
        batch, collector = state["batch"], self._collector
        self._fetched = None
        if batch is not None:
            shape = [*collector.env.batch_size, collector.steps_per_batch]
            self._fetched = TensorDict.from_dict(batch, batch_size=shape, device=collector.env.device)
            self._fetched.refine_names(..., "time")
        return restored

    def shutdown(self) -> None:
        """Wait for the current batch and close the environment; repeated calls are harmless."""
        self._thread.shutdown(wait=True)
        self._collector.shutdown()
