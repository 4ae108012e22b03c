"""Base class of collectors: iteration, delivery to a replay buffer, and background collection."""

from __future__ import annotations

import queue
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from tensordict import TensorDict, TensorDictBase

from recurl.core.errors import ArgumentError, ArgumentTypeError, RecurlWarning, UsageError

__all__ = ["CollectorBase", "Extendable", "units_of"]

_T = TypeVar("_T")
_C = TypeVar("_C", bound="CollectorBase")
_EXIT_SECONDS = 10.0


class Extendable(Protocol):
    """An object that accepts batches, such as a replay buffer."""

    def extend(self, data: Any, /) -> Any:
        """Add a batch."""
        ...


class _Background:
    """Thread that repeats a function until it returns False or raises, or :meth:`stop` is called.

    Args:
        step: the function to repeat.
    """

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._stop = threading.Event()
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._ended = False
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="recurl-collector", daemon=True)
        self._thread.start()
        self._at_exit = weakref.finalize(self, _stop_thread, self._stop, self._thread)

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and self._step():
                self._serve()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the next call
            self._error = error
        finally:
            with self._lock:
                self._ended = True
            self._serve()

    def _serve(self) -> None:
        while not self._requests.empty():
            function, future = self._requests.get()
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
                future.set_exception(error)

    @property
    def running(self) -> bool:
        """Whether the thread is still running."""
        return not self._ended

    def call(self, function: Callable[[], _T]) -> _T:
        """Call ``function`` in the thread between two steps, and return its result."""
        with self._lock:
            ended, future = self._ended, Future[_T]()
            if not ended:
                self._requests.put((function, future))
        return function() if ended else future.result()

    def stop(self, timeout: float | None) -> bool:
        """Stop after the current step, wait up to ``timeout`` seconds, and return whether the thread has ended."""
        self._stop.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def raise_error(self) -> None:
        """Raise the exception that ended the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _stop_thread(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    thread.join(_EXIT_SECONDS)  # a daemon thread still running at interpreter exit may crash it


class CollectorBase(ABC):
    """Base class of all collectors.

    Args:
        frames_per_batch: number of frames in a batch.
        total_frames: number of frames after which collection stops, rounded up (with a warning) to whole batches; -1
            for no limit.
        postproc: function applied to every batch; its result is delivered instead.
        replay_buffer: buffer whose ``extend`` receives the batches; None is yielded for each. Batches with more
            dimensions than the buffer's storage are flattened to its number of dimensions, row by row.

    Raises:
        ArgumentError: a count is out of range.
        ArgumentTypeError: ``replay_buffer`` has no ``extend``.
    """

    max_lag: int | None = 0
    """Maximum number of updates by which the weights of a batch may be older than the newest; None for no limit."""

    def __init__(
        self,
        frames_per_batch: int,
        total_frames: int,
        postproc: Callable[[TensorDict], Any] | None,
        replay_buffer: Extendable | None,
    ) -> None:
        if replay_buffer is not None and not hasattr(replay_buffer, "extend"):
            raise ArgumentTypeError(f"replay_buffer must have a method extend(batch), got {replay_buffer!r}.")
        if total_frames != -1:
            batch = f"batches of {frames_per_batch} frames"
            total_frames = units_of("total_frames", total_frames, frames_per_batch, batch) * frames_per_batch
        self.frames_per_batch = frames_per_batch
        self.total_frames = total_frames
        self.postproc = postproc
        self.replay_buffer = replay_buffer
        self.frames = 0
        self.closed = False
        self._background: _Background | None = None

    @abstractmethod
    def _collect(self) -> TensorDict:
        """Return the next batch and count its frames."""

    @abstractmethod
    def _close(self) -> None:
        """Release the collector's resources."""

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until ``total_frames`` are collected; iterating again continues from there.

        With a replay buffer, None is yielded after every batch.

        Raises:
            UsageError: the collector was shut down or is running in the background.
        """
        self._check_idle()
        while self._remains():
            self._check_idle()
            yield self._deliver(self._collect())

    def collect(self) -> TensorDict:
        """Collect and return one batch, independently of ``total_frames`` and ``replay_buffer``.

        Raises:
            UsageError: the collector was shut down or is running in the background, or a step writes other entries than
                the first one.
        """
        self._check_idle()
        return self._collect()

    def _remains(self) -> bool:
        return self.total_frames == -1 or self.frames < self.total_frames

    def _deliver(self, batch: TensorDict) -> Any:
        data = batch if self.postproc is None else self.postproc(batch)
        if self.replay_buffer is None:
            return data
        ndim = getattr(getattr(self.replay_buffer, "storage", None), "ndim", None)
        if ndim is not None and isinstance(data, TensorDictBase) and data.ndim > ndim:
            data = data.flatten(0, data.ndim - ndim)
        self.replay_buffer.extend(data)
        return None

    # -- background collection

    def start(self) -> None:
        """Start collecting into the replay buffer in a thread, until ``total_frames`` or :meth:`async_shutdown`.

        The thread has its own recurrent mode and exploration type, and uses a copy of the policy that only
        :meth:`update_policy_weights_` changes. An exception in the thread is raised by the next method call.

        Raises:
            UnsupportedError: the policy runs in this process, and tensordict is 0.14, which has one exploration type
                for all threads.
            UsageError: there is no replay buffer, the collector was shut down, or it was already started.
        """
        self._check_idle()
        if self.replay_buffer is None:
            raise UsageError("Collection in the background needs a buffer for the batches: pass replay_buffer=.")
        self._prepare_background()
        self._background = _Background(self._background_step)

    @abstractmethod
    def _prepare_background(self) -> None:
        """Isolate the collector from other threads."""

    def _background_step(self) -> bool:
        if self._remains():
            self._deliver(self._collect())
        return self._remains()

    @property
    def running(self) -> bool:
        """Whether the collector is running in the background."""
        return self._background is not None and self._background.running

    def async_shutdown(self, timeout: float | None = None) -> None:
        """Stop the thread after its current batch, and shut down.

        Args:
            timeout: seconds to wait for that batch; None for no limit.

        Raises:
            UsageError: the batch takes longer; the collector is not shut down then.
            Exception: the exception that ended the thread, if it was not raised earlier.
        """
        if self._background is not None and not self._background.stop(timeout):
            raise UsageError(
                f"The background thread has not finished its batch after {timeout} s: set a larger timeout=."
            )
        self.closed = True
        self._close()
        self._raise_background_error()

    def shutdown(self) -> None:
        """Stop collecting and release all resources; repeated calls are harmless."""
        self.async_shutdown()

    def _between_batches(self, function: Callable[[], _T]) -> _T:
        """Call ``function`` while no batch is being collected, and return its result."""
        self._raise_background_error()
        return function() if self._background is None else self._background.call(function)

    def _raise_background_error(self) -> None:
        if self._background is not None:
            self._background.raise_error()

    def _check_idle(self) -> None:
        self._raise_background_error()
        self._check_open()
        if self.running:
            raise UsageError("This collector runs in the background: sample from its replay buffer instead.")

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("This collector was shut down: create a new one to collect more.")

    def __enter__(self: _C) -> _C:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def units_of(name: str, frames: int, unit: int, description: str) -> int:
    """Return ``frames / unit``, rounded up with a warning.

    Args:
        name: name of the argument for the number of frames, for messages.
        frames: number of frames, at least 1.
        unit: number of frames in a unit.
        description: description of the unit, for the warning.

    Raises:
        ArgumentError: ``frames`` is below 1.
    """
    if frames < 1:
        raise ArgumentError(f"{name} must be at least 1, got {frames}.")
    count = -(-frames // unit)
    if count * unit != frames:
        text = f"{name}={frames} is not a multiple of {description}: {count * unit} will be collected."
        warnings.warn(text, RecurlWarning, stacklevel=4)
    return count
